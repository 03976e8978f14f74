"""From a WorkerSpec to an engine: a real model behind the core.

Wiring only: model source -> weights and tokenizer -> decoder, KV pool, sampler -> executor and core.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch

from agentserve.core.config import CoreConfig
from agentserve.core.cost import StepCost
from agentserve.core.engine import EngineCore
from agentserve.executor.calibrate import Bounds, measure_cost
from agentserve.executor.pool import PAGE_LAYOUT, KVPool, kv_groups
from agentserve.executor.runner import TorchExecutor
from agentserve.executor.sampler import Sampler
from agentserve.machine import available_memory, pool_bytes
from agentserve.messages import PROTOCOL_VERSION, Hello
from agentserve.models.config import DecoderConfig
from agentserve.models.decoder import Decoder
from agentserve.models.load import DTYPES, load_config, load_model
from agentserve.models.source import resolve
from agentserve.server.workers.spec import WorkerSpec
from agentserve.server.workers.vocabulary import shown_bytes
from agentserve.server.workers.worker_main import BuiltEngine
from agentserve.text import load
from agentserve.types import KVGroup
from agentserve.values import show_size
from kernels import ops_for
from kernels.ops import AttentionShape, Ops, Span
from tiering.keys import namespace_digest

log = logging.getLogger(__name__)

GPU_SHARE = 0.8  # of a GPU's free memory, once the weights are there; the rest is for activations


def build_engine(spec: WorkerSpec) -> BuiltEngine:
    """Load the model and put the engine together. Raises ValueError (ModelError, TextError) or OSError
    with one line that says what is wrong with the model or the settings."""
    torch.set_num_threads(spec.threads)
    device, dtype = torch.device(spec.device), DTYPES[spec.dtype]
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {spec.device}: torch finds no CUDA device")
    source = resolve(spec.model)
    ops = ops_for(device)
    _check_early(spec, load_config(source), dtype, ops)  # before minutes of reading weights
    text = load(source.path, Path(spec.chat_template) if spec.chat_template else None)
    loaded = load_model(source, dtype, device)
    config = loaded.config
    longest = _context(spec, config)
    groups = kv_groups(config, spec.page_size, dtype)
    pages = _pages(spec, groups, device)
    reach = _reach(longest, min(pages), spec.page_size)
    decoder = Decoder(config, loaded.weights, ops, positions=reach)
    pool = KVPool(config, pages, spec.page_size, dtype, device)
    sampler = Sampler(
        config.vocab_size, shown_bytes(text.tokenizer), text.end_ids, max_sessions=4 * spec.max_num_seqs
    )
    namespace = namespace_digest(
        {
            "weights": loaded.digest,
            "dtype": spec.dtype,
            "layout": PAGE_LAYOUT,
            "page_size": spec.page_size,
            "rope": repr(config.rope),
            "kernels": ops.numerics,
        }
    )
    executor = TorchExecutor(decoder, pool, sampler)
    bounds = Bounds(
        groups=len(groups),
        pages=min(pages),
        page_size=spec.page_size,
        positions=reach,
        rows=spec.max_num_seqs,
        tokens=spec.max_batched_tokens,
        vocab_size=config.vocab_size,
    )
    cost = _step_cost(spec.max_step_seconds, executor, bounds)
    core_config = CoreConfig(
        page_size=spec.page_size,
        max_model_len=longest,
        max_num_seqs=spec.max_num_seqs,
        max_batched_tokens=spec.max_batched_tokens,
        max_step_seconds=spec.max_step_seconds,
        eos_token_ids=text.end_ids,
        namespace=namespace,
    )
    core = EngineCore(core_config, groups, pages, cost)
    assert core.limit == reach
    if core.limit < longest:
        log.warning("the KV pool holds %d tokens, less than the context of %d", core.limit, longest)
    hello = Hello(
        protocol=PROTOCOL_VERSION,
        pid=os.getpid(),
        backend=ops.name,
        device=spec.device,
        dtype=spec.dtype,
        vocab_size=config.vocab_size,
        max_model_len=core.limit,
        page_size=spec.page_size,
        pages=min(pages),
        kv_bytes=pool.nbytes,
        parameters=decoder.parameters,
        weights_digest=loaded.digest,
    )
    return BuiltEngine(core, executor, hello, core_config, groups, pages, cost)


def _step_cost(limit: float | None, executor: TorchExecutor, bounds: Bounds) -> StepCost:
    """What steps cost here, measured if their predicted time is to be limited. ValueError if the limit
    is shorter than the shortest step."""
    if limit is None:
        return StepCost()
    cost = measure_cost(executor, bounds)
    log.info(
        "a step takes %.2f ms, and %.3f ms per row, %.4f ms per token, %.4f ms per 1000 pairs attended",
        cost.fixed * 1e3, cost.per_row * 1e3, cost.per_token * 1e3, cost.per_context * 1e6,
    )  # fmt: skip
    shortest = cost.step([(0, 1)])
    if shortest > limit:
        raise ValueError(f"--max-step-ms {limit * 1e3:g}: one token alone takes {shortest * 1e3:.3g} ms here")
    # The least that a step may hold is the rest of a page.
    page = min(bounds.page_size, bounds.positions)
    longest = cost.step([(bounds.positions - page, page)])
    if longest > limit:
        log.warning(
            "a page at the end of the context takes %.0f ms: longer than --max-step-ms", longest * 1e3
        )
    return cost


def _check_early(spec: WorkerSpec, config: DecoderConfig, dtype: torch.dtype, ops: Ops) -> None:
    _context(spec, config)
    shape = AttentionShape(config.heads, config.kv_heads, config.head_dim, spec.page_size)
    table = torch.zeros((1, 1), dtype=torch.int64, device=torch.device(spec.device))
    try:
        ops.attention(shape, [Span(0, 1, 0)], table)
    except ValueError as error:
        raise ValueError(f"--page-size {spec.page_size}: {error}") from None
    if spec.device_kv is not None:
        _page_count(spec.device_kv, kv_groups(config, spec.page_size, dtype))


def _context(spec: WorkerSpec, config: DecoderConfig) -> int:
    if spec.max_model_len is None:
        return config.max_position
    if spec.max_model_len > config.max_position:
        raise ValueError(
            f"--max-model-len {spec.max_model_len}: the model was made for {config.max_position} positions"
        )
    return spec.max_model_len


def _pages(spec: WorkerSpec, groups: tuple[KVGroup, ...], device: torch.device) -> tuple[int, ...]:
    """As many pages for every group as the pool's bytes allow."""
    size = spec.device_kv
    if size is None and device.type == "cuda":
        size = int(torch.cuda.mem_get_info(device)[0] * GPU_SHARE) // spec.kv_share
    elif size is None:
        size = pool_bytes(available_memory(), spec.kv_share)
    return (_page_count(size, groups),) * len(groups)


def _reach(longest: int, pages: int, page_size: int) -> int:
    """Positions that a session can come to (the core's own limit): tables for more are never read, and a
    model's file may name millions."""
    return min(longest, (pages - 1) * page_size)


def _page_count(size: int, groups: tuple[KVGroup, ...]) -> int:
    per_page = sum(group.page_bytes for group in groups)
    if size < 2 * per_page:
        raise ValueError(
            f"a KV pool of {show_size(size)} holds {size // per_page} pages of {show_size(per_page)}: "
            "give it more with --device-kv"
        )
    return size // per_page
