"""An engine: as a worker builds it on a GPU; over a tiny random model where kernels are interpreted."""

from __future__ import annotations

import os

import torch

from agentserve.bench.gpu.device import Device
from agentserve.bench.gpu.sizes import Sizes
from agentserve.config import load
from agentserve.core.config import CoreConfig
from agentserve.core.cost import StepCost
from agentserve.core.engine import EngineCore
from agentserve.executor.pool import KVPool
from agentserve.executor.runner import TorchExecutor
from agentserve.executor.sampler import Sampler
from agentserve.machine import usable_cores
from agentserve.messages import PROTOCOL_VERSION, Hello
from agentserve.models.decoder import Decoder
from agentserve.models.hf_config import hf_config
from agentserve.models.weights import random_weights
from agentserve.server.workers.build import build_engine
from agentserve.server.workers.spec import worker_spec
from agentserve.server.workers.worker_main import BuiltEngine
from kernels.ops import Ops

MODEL = "smollm2-135m"
_TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rope_theta": 10000.0,
    "num_hidden_layers": 1,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
_TINY_PAGES = 40


def engine(on: Device, sizes: Sizes, ops: Ops, device_kv: str) -> BuiltEngine:
    """`device_kv` bytes of KV on a GPU. ValueError or OSError, one line, where it cannot be built; also
    where a GPU's engine would not run these kernels."""
    if on.reduced:
        return _tiny(sizes, ops)
    flags = {"model": MODEL, "dtype": "bf16", "weights": "expanded", "device": "cuda", "device_kv": device_kv}
    built = build_engine(worker_spec(load(flags, None), 0, "", os.getpid(), usable_cores()))
    if built.hello.backend != ops.name:
        raise ValueError(f"the engine runs on {built.hello.backend}: {built.hello.backend_reason}")
    return built


def _tiny(sizes: Sizes, ops: Ops) -> BuiltEngine:
    dtype, page_size = sizes.dtypes[0], sizes.slots
    values = {
        **_TINY,
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.inner,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.dim,
    }
    config = hf_config(values, "tiny")
    decoder = Decoder(config, random_weights(config, 1, dtype=dtype), ops, config.max_position, "float")
    pool = KVPool(config, (_TINY_PAGES,), page_size, dtype, torch.device("cpu"))
    sampler = Sampler(config.vocab_size, [b""] * config.vocab_size, ())
    executor = TorchExecutor(decoder, pool, sampler)
    executor.prepare(4)
    core = CoreConfig(page_size=page_size, max_model_len=256, max_batched_tokens=64, namespace=bytes(32))
    hello = Hello(
        protocol=PROTOCOL_VERSION,
        pid=os.getpid(),
        backend=ops.name,
        backend_reason="asked for",
        device="cpu",
        dtype="fp16",
        weights="expanded",
        activations="float",
        kv_dtype="fp16",
        vocab_size=config.vocab_size,
        max_model_len=core.max_model_len,
        page_size=page_size,
        pages=_TINY_PAGES,
        kv_bytes=pool.nbytes,
        parameters=0,
        weight_bytes=decoder.step_bytes,
        weights_digest="",
        namespace=core.namespace.hex(),
    )
    cost = StepCost(fixed=0.3, per_token=0.02)  # not measured: that takes a minute here
    return BuiltEngine(
        EngineCore(core, pool.groups, pool.pages, cost), executor, hello, core, pool.groups, pool.pages, cost
    )
