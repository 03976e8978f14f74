"""vLLM for CPU in `PEERS/vllm`: a server beside ours, on the same bf16 weights, with as much KV."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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


@contextmanager
def contestants(settings: Settings, logs: Path, chunk: int | None = None) -> Iterator[Sequence[Contestant]]:
    """Both servers, ready; with `chunk`, both take that many tokens a step."""
    model = settings.model or str(settings.needed(MODEL_FOLDER))
    tcmalloc, openmp = _tcmalloc(), settings.needed("vllm/lib/libiomp5.so")
    peer_command = [
        *(str(settings.needed("vllm/bin/python")), str(settings.needed("vllm/bin/vllm")), "serve", model),
        *("--served-model-name", MODEL, "--host", "127.0.0.1", "--dtype", "bfloat16"),
        *("--max-model-len", str(MAX_MODEL_LEN), "--enable-prompt-tokens-details"),
    ]
    peer_settings = {
        "VLLM_CPU_KVCACHE_SPACE": str(settings.kv_gib),
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_OMP_THREADS_BIND": core_list(os.sched_getaffinity(0)),
        "LD_PRELOAD": f"{tcmalloc}:{openmp}",
    }
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    ours = {
        **{"dtype": "bf16", "max_model_len": str(MAX_MODEL_LEN), "log_level": "warning"},
        **{"device_kv": f"{settings.kv_gib}GiB", "threads": str(settings.threads)},
        **settings.flags,
    }
    if chunk is not None:
        peer_command += ["--max-num-batched-tokens", str(chunk)]
        ours["max_batched_tokens"] = str(chunk)
    our_command = [sys.executable, "-P", "-m", "agentserve", "serve", "--model", model]
    our_command += ["--served-model-name", MODEL, *as_arguments(ours)]
    with ExitStack() as running:

        def start(
            name: str, command: Sequence[str], environment: Mapping[str, str], shown: Mapping[str, str]
        ) -> Contestant:
            port = free_port()
            command = [*command, "--port", str(port)]
            child = running.enter_context(Child(name, command, logs, environment))
            url = f"http://127.0.0.1:{port}"
            version = wait_ready(child, url, settings.start_limit)
            facts = Facts(name, version, {"command": " ".join(command), **shown})
            return Served(child, url, facts, settings.run_limit)

        yield [
            start("vllm", peer_command, peer_environment(peer_settings | quiet), peer_settings),
            start("agentserve", our_command, worker_environment(), {}),
        ]


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
