"""Lives of a real server with KV on disk: started, killed, started again on the same folder."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.process.test_proc_launch import gone, until
from tests.process.test_proc_tiers import LIMIT, at_rest

FLAGS = {
    "served_model_name": "smollm2-135m",  # also where it is another
    "device_kv": "14MiB",
    "host_kv": "4MiB",
    "disk_kv": "64MiB",
    "tier_policy": "lru",
    "threads": "1",
    "log_level": "warning",
}


AGENTS = 5
FACTS = " ".join(f"Fact {number} is {number * number}." for number in range(12))
Said = list[tuple[float, ...]]  # by turn: log-probabilities of its tokens and of the runners-up


def agents(client: httpx.Client, turns: int = 2, names: Iterable[int] = range(AGENTS)) -> Said:
    """What five agents are told in as many turns each, two at a time: numbers in which every bit of the KV
    that was read shows."""
    histories: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": f"Agent {name}. {FACTS} Say something of agent {name}."}]
        for name in names
    ]
    said: Said = []

    def turn(history: list[dict[str, Any]]) -> tuple[dict[str, Any], tuple[float, ...]]:
        body = {
            "model": "smollm2-135m",
            "messages": history,
            "temperature": 0,
            "max_tokens": 4,
            "ignore_eos": True,
        }
        reply = client.post("/v1/chat/completions", json=body | {"logprobs": True, "top_logprobs": 5})
        assert reply.status_code == 200, reply.text
        choice = reply.json()["choices"][0]
        tops = [top for token in choice["logprobs"]["content"] for top in token["top_logprobs"]]
        message = {"role": "assistant", "content": choice["message"]["content"]}
        return message, tuple(top["logprob"] for top in tops)

    with ThreadPoolExecutor(2) as pool:
        for _ in range(turns):
            for history, (message, numbers) in zip(histories, pool.map(turn, histories), strict=True):
                assert len(numbers) == 20
                said.append(numbers)
                history += [message, {"role": "user", "content": "Go on."}]
    return said


class Life:
    """One server process on `folder / "data"`, whose disk is what `folder / "armed"` says."""

    def __init__(self, folder: Path, **flags: str) -> None:
        self.folder = folder
        self.arm("")
        script = Path(__file__).with_name("faulty_server.py")
        settings = FLAGS | {"data_dir": str(folder / "data")} | flags
        pairs = [word for pair in settings.items() for word in pair]
        command = [sys.executable, str(script), str(folder / "armed"), *pairs]
        self._log = (folder / "log").open("w+")
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._log, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("ready on "), (line, self.log())
        self.client = httpx.Client(base_url=line.split()[-1], timeout=LIMIT)

    def arm(self, fault: str) -> None:
        (self.folder / "armed").write_text(fault)

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def worker(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return int(children.read_text().split()[0])

    def kill(self) -> None:
        """`kill -9` of everything."""
        worker = self.worker()
        self.process.kill()
        self.process.wait(LIMIT)
        until(lambda: gone(worker))

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(LIMIT)
        assert self.process.returncode == 0, self.log()

    def close(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.communicate()
        self._log.close()

    def faults(self) -> dict[str, float]:
        """How often each thing went wrong, but for what never did; once nothing is being moved."""
        found = at_rest(self.client)
        assert found["pinned_pages"] == 0
        counted = {
            name.split()[1]: count for name, count in found.items() if name.startswith("faults_total ")
        }
        return {name: count for name, count in counted.items() if count}

    def disk(self) -> dict[str, Any]:
        """What /health says of it."""
        said: dict[str, Any] = self.client.get("/health").json()["tiers"]["disk"]
        return said


@contextmanager
def life(folder: Path, **flags: str) -> Iterator[Life]:
    """A server that is to end in good order, unless it was killed before."""
    made = Life(folder, **flags)
    try:
        yield made
        if made.process.poll() is None:
            made.stop()
    finally:
        made.close()
