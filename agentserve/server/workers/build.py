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
from agentserve.executor.group import GroupExecutor
from agentserve.executor.matcher_process import Host
from agentserve.executor.matchers import GuardedGrammars
from agentserve.executor.pool import PAGE_LAYOUT, KVPool
from agentserve.executor.runner import TorchExecutor
from agentserve.executor.sampler import Sampler
from agentserve.messages import PROTOCOL_VERSION, Hello, RunCounts
from agentserve.models.load import LoadedModel
from agentserve.models.weights import parameter_count
from agentserve.server.workers.build_cost import fingerprint, step_cost
from agentserve.server.workers.build_rank import OpenRank, open_rank
from agentserve.server.workers.build_tiers import build_tiers
from agentserve.server.workers.exchange import Tiering
from agentserve.server.workers.followers import Followers
from agentserve.server.workers.sizes import tier_sizes
from agentserve.server.workers.spec import WorkerSpec
from agentserve.server.workers.vocabulary import shown_bytes
from agentserve.server.workers.worker_main import BuiltEngine
from agentserve.text import load
from kernels import Backend
from kernels.ops import Ops
from tiering.keys import namespace_digest
from tiering.stores.faults import Fault, no_fault

log = logging.getLogger(__name__)


def build_engine(spec: WorkerSpec, fault: Fault = no_fault, matchers: Host | None = None) -> BuiltEngine:
    """Load the model and put the engine together. Raises ValueError (ModelError, TextError) or OSError
    with one line that says what is wrong with the model or the settings.

    fault: what stores do at named points, for tests. matchers: the host of the processes that grammars are
    followed in (`fork_host`); in this one without."""
    rank = open_rank(spec)
    if spec.tensor_parallel == 1:
        return _build(spec, rank, None, fault, matchers)
    followers = Followers(spec)
    try:
        return _build(spec, rank, followers, fault, matchers)
    except BaseException:
        followers.close(0.0)
        raise


def _build(
    spec: WorkerSpec, rank: OpenRank, followers: Followers | None, fault: Fault, matchers: Host | None
) -> BuiltEngine:
    chat_template = Path(spec.chat_template) if spec.chat_template else None
    text = load(rank.source.path, chat_template, spec.tool_parser, spec.reasoning_parser)
    loaded = rank.load()
    config, groups, longest = loaded.config, rank.groups, rank.longest
    pages, ranks, weight_bytes = rank.pages(loaded.weights.nbytes_in_blocks), None, loaded.weights.nbytes
    if followers is not None:
        pages, others = followers.loaded(loaded.digest, pages)
        weight_bytes += others
        ranks = followers.meet(pages, rank.device)
    reach = rank.reach(pages)
    shown = shown_bytes(text.tokenizer)
    grammars = GuardedGrammars(matchers, shown, config.vocab_size, text.end_ids) if matchers else None
    sampler = Sampler(
        config.vocab_size,
        shown,
        text.end_ids,
        4 * spec.max_num_seqs,
        grammars,
        drawing=rank.backend.ops.drawing(),
    )
    own, backend = rank.executor(loaded, pages, sampler, ranks), rank.backend
    pool, decoder = own.pool, own.decoder
    if prepared := own.prepare(spec.max_num_seqs):
        log.info("%s", prepared)
        backend = replace(backend, reason=f"{backend.reason}; {prepared}")
    executor: TorchExecutor | GroupExecutor = own
    if followers is not None:
        followers.wait()
        executor = GroupExecutor(own, followers.pipes)
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
        namespace=_namespace(spec, loaded, backend.ops),
    )
    hello = _hello(
        spec,
        loaded,
        backend,
        reach,
        pool,
        policy=core_config.scheduling.policy,
        weight_bytes=weight_bytes,
    )
    on_gpu = rank.device.type == "cuda"
    here = fingerprint(spec, hello, torch.cuda.get_device_name(rank.device) if on_gpu else "")
    cost = step_cost(spec, here, executor, bounds)
    sizes = tier_sizes(spec, groups, None)  # that the memory is there was seen before the pool took its own
    tiers = None
    if sizes is not None:
        tiers = build_tiers(spec, sizes, pool, core_config.namespace, fault, cost=cost)
        if tiers.copies is not None:
            assert isinstance(executor, TorchExecutor)  # several ranks have no tiers
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
        release=followers.close if followers is not None else None,
    )  # fmt: skip


def _hello(
    spec: WorkerSpec,
    loaded: LoadedModel,
    backend: Backend,
    limit: int,
    pool: KVPool,
    *,
    policy: str,
    weight_bytes: int,
) -> Hello:
    """What the worker says of itself; `limit` is the longest context that a session can come to,
    `weight_bytes` are of all ranks."""
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
        parameters=parameter_count(loaded.config),
        weight_bytes=weight_bytes,
        weights_digest=loaded.digest,
        namespace=_namespace(spec, loaded, backend.ops).hex(),
        policy=policy,
        tensor_parallel=spec.tensor_parallel,
    )


def _namespace(spec: WorkerSpec, loaded: LoadedModel, ops: Ops) -> bytes:
    """Everything that decides a page's bytes, but for the tokens."""
    return namespace_digest(
        {
            "weights": loaded.digest,
            "dtype": spec.dtype,
            "quantization": repr(loaded.quantization),  # the same tensors may be read in two ways
            "weights_kept": _stored_formats(loaded),
            "activations": spec.activations,
            "kv_dtype": _kv_name(spec),
            "layout": PAGE_LAYOUT,
            "page_size": spec.page_size,
            "rope": repr(loaded.config.rope),
            "kernels": ops.numerics,
            "tensor_parallel": spec.tensor_parallel,
        }
    )


def _stored_formats(loaded: LoadedModel) -> str:
    """The formats that stay as the file has them."""
    return "/".join(loaded.weights.formats) or "expanded"


def _kv_name(spec: WorkerSpec) -> str:
    return spec.dtype if spec.kv_dtype == "auto" else spec.kv_dtype
