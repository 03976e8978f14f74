"""From a WorkerSpec to an engine: a real model behind the core.

Wiring only: model source -> weights and tokenizer -> decoder, KV pool, sampler -> executor and core.
"""

from __future__ import annotations

import logging
import os
from dataclasses import astuple, replace
from pathlib import Path

import torch

from agentserve.core.config import CoreConfig
from agentserve.core.engine import EngineCore
from agentserve.core.timing.tally import Attention
from agentserve.executor.calibrate import Bounds
from agentserve.executor.matcher_process import Host
from agentserve.executor.matchers import GuardedGrammars
from agentserve.executor.pool import PAGE_LAYOUT, KVPool, kv_groups
from agentserve.executor.runner import TorchExecutor
from agentserve.executor.sampler import Sampler
from agentserve.messages import PROTOCOL_VERSION, Hello, RunCounts
from agentserve.models.decoder import Decoder
from agentserve.models.load import DTYPES, LoadedModel, open_model
from agentserve.models.source import resolve
from agentserve.server.workers.build_cost import fingerprint, step_cost
from agentserve.server.workers.build_tiers import build_tiers
from agentserve.server.workers.exchange import Tiering
from agentserve.server.workers.sizes import (
    check_blocks,
    check_settings,
    context_of,
    kv_dtype_of,
    page_counts,
    reach_of,
    storage_of,
    tier_sizes,
)
from agentserve.server.workers.spec import WorkerSpec
from agentserve.server.workers.vocabulary import shown_bytes
from agentserve.server.workers.worker_main import BuiltEngine
from agentserve.text import load
from kernels import Backend, backend_for
from kernels.ops import Ops
from tiering.keys import namespace_digest
from tiering.stores.faults import Fault, no_fault

log = logging.getLogger(__name__)


def build_engine(spec: WorkerSpec, fault: Fault = no_fault, matchers: Host | None = None) -> BuiltEngine:
    """Load the model and put the engine together. Raises ValueError (ModelError, TextError) or OSError
    with one line that says what is wrong with the model or the settings.

    fault: what stores do at named points, for tests. matchers: the host of the processes that grammars are
    followed in (`fork_host`); in this one without."""
    torch.set_num_threads(spec.threads)
    device, dtype = _device(spec), DTYPES[spec.dtype]
    source = resolve(spec.model)
    backend = backend_for(device)
    ops = backend.ops
    opened = open_model(source)
    check_settings(spec, source, opened.config, ops)  # before minutes of reading weights
    chat_template = Path(spec.chat_template) if spec.chat_template else None
    text = load(source.path, chat_template, spec.tool_parser, spec.reasoning_parser)
    loaded = opened.load(dtype, device, storage_of(spec, opened))
    check_blocks(spec, source, loaded.weights)
    config, kv_dtype = loaded.config, kv_dtype_of(spec)
    longest = context_of(spec, config)
    groups = kv_groups(config, spec.page_size, kv_dtype)
    pages = page_counts(spec, groups, device)
    reach = reach_of(longest, min(pages), spec.page_size)
    decoder = Decoder(config, loaded.weights, ops, reach, spec.activations)
    pool = KVPool(config, pages, spec.page_size, kv_dtype, device)
    shown = shown_bytes(text.tokenizer)
    grammars = GuardedGrammars(matchers, shown, config.vocab_size, text.end_ids) if matchers else None
    sampler = Sampler(
        config.vocab_size, shown, text.end_ids, 4 * spec.max_num_seqs, grammars, drawing=ops.drawing()
    )
    executor = TorchExecutor(decoder, pool, sampler)
    if prepared := executor.prepare(spec.max_num_seqs):
        log.info("%s", prepared)
        backend = replace(backend, reason=f"{backend.reason}; {prepared}")
    bounds = Bounds(
        groups=len(groups),
        pages=min(pages),
        page_size=spec.page_size,
        positions=reach,
        rows=spec.max_num_seqs,
        tokens=spec.max_batched_tokens,
        vocab_size=config.vocab_size,
    )
    core_config = CoreConfig(
        page_size=spec.page_size,
        max_model_len=longest,
        max_num_seqs=spec.max_num_seqs,
        max_batched_tokens=spec.max_batched_tokens,
        max_step_seconds=spec.max_step_seconds,
        scheduling=spec.scheduling,
        eos_token_ids=text.end_ids,
        namespace=_namespace(spec, loaded, ops),
    )
    hello = _hello(spec, loaded, backend, reach, pool, policy=core_config.scheduling.policy)
    here = fingerprint(spec, hello, torch.cuda.get_device_name(device) if device.type == "cuda" else "")
    cost = step_cost(spec, here, executor, bounds)
    sizes = tier_sizes(spec, groups, None)  # that the memory is there was seen before the pool took its own
    tiers = None
    if sizes is not None:
        tiers = build_tiers(spec, sizes, pool, core_config.namespace, fault, cost=cost)
        if tiers.copies is not None:
            executor.expect(tiers.copies)
    core = EngineCore(core_config, groups, pages, cost, tiers.parts if tiers is not None else None)
    assert core.limit == reach
    if core.limit < longest:
        log.warning("the KV pool holds %d tokens, less than the context of %d", core.limit, longest)
    return BuiltEngine(
        core, executor, hello, core_config, groups, pages, cost,
        tiering=Tiering(core, tiers.mover, tiers.release) if tiers is not None else None,
        tiers=tiers.parts.setup if tiers is not None else None,
        when_computing=executor.when_computing,
        runs=(lambda: RunCounts(*astuple(decoder.runs))) if prepared else None,
        fingerprint=here,
        attention=Attention(groups, spec.page_size),
    )  # fmt: skip


def _device(spec: WorkerSpec) -> torch.device:
    """The device that is asked for, made this thread's own where it is a GPU. ValueError if there is none."""
    device = torch.device(spec.device)
    if device.type != "cuda":
        return device
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= found:
        has = f"only {found}" if found else "no CUDA device"
        raise ValueError(f"--device {spec.device}: torch finds {has}{_why_none() if not found else ''}")
    torch.cuda.set_device(device)
    return device


def _why_none() -> str:
    return "" if torch.version.cuda else f" (torch {torch.__version__} was built without CUDA)"


def _hello(
    spec: WorkerSpec, loaded: LoadedModel, backend: Backend, limit: int, pool: KVPool, *, policy: str
) -> Hello:
    """What the worker says of itself; `limit` is the longest context that a session can come to."""
    return Hello(
        protocol=PROTOCOL_VERSION,
        pid=os.getpid(),
        backend=backend.ops.name,
        backend_reason=backend.reason,
        device=spec.device,
        dtype=spec.dtype,
        weights=_stored_formats(loaded),
        activations=spec.activations,
        kv_dtype=_kv_name(spec),
        vocab_size=loaded.config.vocab_size,
        max_model_len=limit,
        page_size=spec.page_size,
        pages=min(pool.pages),
        kv_bytes=pool.nbytes,
        parameters=loaded.weights.parameters,
        weight_bytes=loaded.weights.nbytes,
        weights_digest=loaded.digest,
        namespace=_namespace(spec, loaded, backend.ops).hex(),
        policy=policy,
    )


def _namespace(spec: WorkerSpec, loaded: LoadedModel, ops: Ops) -> bytes:
    """Everything that decides a page's bytes, but for the tokens."""
    return namespace_digest(
        {
            "weights": loaded.digest,
            "dtype": spec.dtype,
            "weights_kept": _stored_formats(loaded),
            "activations": spec.activations,
            "kv_dtype": _kv_name(spec),
            "layout": PAGE_LAYOUT,
            "page_size": spec.page_size,
            "rope": repr(loaded.config.rope),
            "kernels": ops.numerics,
        }
    )


def _stored_formats(loaded: LoadedModel) -> str:
    """The formats that stay as the file has them."""
    return "/".join(loaded.weights.formats) or "expanded"


def _kv_name(spec: WorkerSpec) -> str:
    return spec.dtype if spec.kv_dtype == "auto" else spec.kv_dtype
