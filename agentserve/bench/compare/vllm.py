"""vLLM for CPU in `PEERS/vllm`: a server beside ours, on the same bf16 weights, with as much KV."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from agentserve.bench.compare.child import Child, peer_environment
from agentserve.bench.compare.contest import Contestant, PeerFailed
from agentserve.bench.compare.plan import Scenario
from agentserve.bench.compare.result import Facts
from agentserve.bench.compare.served import MODEL, Served, free_port, wait_ready
from agentserve.bench.compare.settings import Settings
from agentserve.server.workers.supervisor import worker_environment

MODEL_FOLDER = "smollm2-hf"
MAX_MODEL_LEN = 8192
CHUNK = 256
SCENARIOS = (
    Scenario("decode", 1, 64, 128),
    Scenario("decode", 8, 64, 128),
    Scenario("decode", 8, 2000, 128),
    Scenario("prefill", 1, 400),
    Scenario("prefill", 1, 2000),
    Scenario("prefill", 1, 3500),
)
CHUNKED = (Scenario("prefill", 1, 2000, note=f" in chunks of {CHUNK}"),)
NOTES = ("prompt lengths are in words; usage counts the tokens",)


@dataclass(frozen=True, slots=True)
class _Server:
    name: str
    command: Sequence[str]  # without its port
    environment: Mapping[str, str]
    settings: Mapping[str, str]  # that the command does not show


@contextmanager
def contestants(settings: Settings, logs: Path, chunk: int | None = None) -> Iterator[Sequence[Contestant]]:
    """Both servers, ready; with `chunk`, both take that many tokens a step."""
    model = settings.model_or(MODEL_FOLDER)
    servers = (_peer(settings, model, chunk), _ours(settings, model, chunk))
    with ExitStack() as running:
        started: list[Contestant] = []
        for server in servers:
            port = free_port()
            command = [*server.command, "--port", str(port)]
            child = running.enter_context(Child(server.name, command, logs, server.environment))
            url = f"http://127.0.0.1:{port}"
            version = wait_ready(child, url, settings.start_limit)
            facts = Facts(server.name, version, {"command": shlex.join(command), **server.settings})
            started.append(Served(child, url, facts, settings.run_limit))
        yield started


def _peer(settings: Settings, model: str, chunk: int | None) -> _Server:
    command = [
        *(str(settings.needed("vllm/bin/python")), str(settings.needed("vllm/bin/vllm")), "serve", model),
        *("--served-model-name", MODEL, "--host", "127.0.0.1", "--dtype", "bfloat16"),
        *("--max-model-len", str(MAX_MODEL_LEN), "--enable-prompt-tokens-details"),
        *(() if chunk is None else ("--max-num-batched-tokens", str(chunk))),
    ]
    shown = {
        "VLLM_CPU_KVCACHE_SPACE": str(settings.kv_gib),
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_OMP_THREADS_BIND": core_list(os.sched_getaffinity(0)),  # by default one core is left out
        "LD_PRELOAD": f"{_tcmalloc()}:{settings.needed('vllm/lib/libiomp5.so')}",
    }
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    return _Server("vllm", command, peer_environment(shown | quiet), shown)


def _ours(settings: Settings, model: str, chunk: int | None) -> _Server:
    flags = {
        "dtype": "bf16",
        "max_model_len": str(MAX_MODEL_LEN),
        "device_kv": f"{settings.kv_gib}GiB",
        "threads": str(settings.threads),
        "log_level": "warning",
        **settings.flags,
        **({} if chunk is None else {"max_batched_tokens": str(chunk)}),
    }
    command = [sys.executable, "-P", "-m", "agentserve", "serve", "--model", model]
    command += ["--served-model-name", MODEL, *as_arguments(flags)]
    return _Server("agentserve", command, worker_environment(), {})


def as_arguments(flags: Mapping[str, str]) -> list[str]:
    """Settings as arguments of `agentserve serve`."""
    return [part for name, value in flags.items() for part in (f"--{name.replace('_', '-')}", value)]


def core_list(cores: set[int]) -> str:
    """`0-1` for a run of cores, else `0,2,5`: the form that the peer's thread binding takes."""
    ordered = sorted(cores)
    if ordered[-1] - ordered[0] + 1 == len(ordered) and len(ordered) > 1:
        return f"{ordered[0]}-{ordered[-1]}"
    return ",".join(map(str, ordered))


def _tcmalloc() -> Path:
    for found in sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4")):
        return found
    raise PeerFailed(
        "vllm: no libtcmalloc_minimal.so.4 under /usr/lib: without it the peer is not at its best"
    )
