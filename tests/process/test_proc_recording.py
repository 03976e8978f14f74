"""A real server that records: every field of every request and iteration, whatever became of them; then the
same folder under a disk that is full, and after `kill -9`."""

from __future__ import annotations

import concurrent.futures
import re
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentserve.records.lines import IterationRecord, RequestRecord, Status
from agentserve.records.reader import Records, read_records
from agentserve.records.steps import timed_steps, whose_steps
from agentserve.server.tenants.keyfile import KeyFile
from agentserve.server.workers.iterations import NO_LIMIT
from tests.process.serving import serving

pytestmark = [pytest.mark.process, pytest.mark.model]

LIMIT = 240.0
CHAT = "/v1/chat/completions"
SECRET = "a secret sentence that nobody writes down"
FACTS = " ".join(f"Fact {number} is {number * number}." for number in range(30))
FLAGS = ["--device-kv", "14MiB", "--host-kv", "4MiB", "--tier-policy", "lru"]  # room for one turn


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def header(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def body(messages: list[dict[str, Any]], count: int, **fields: Any) -> dict[str, Any]:
    told = {"model": "smollm2-135m", "messages": messages, "temperature": 0, "max_tokens": count}
    return {**told, "ignore_eos": True, **fields}


def wait_for(recording: Path, done: Callable[[Records], bool]) -> Records:
    deadline = time.monotonic() + LIMIT
    while True:
        if recording.exists() and done(found := read_records(recording)):
            return found
        assert time.monotonic() < deadline
        time.sleep(0.05)


def ask(client: httpx.Client, key: str, name: str) -> list[tuple[str, dict[str, Any]]]:
    """Two turns of one session: the id of each request, and its usage."""
    messages = [{"role": "user", "content": f"Agent {name}. {SECRET}. {FACTS}"}]
    told = []
    for turn in range(2):
        request = f"{name}-{turn}"
        headers = header(key) | {"x-request-id": request}
        reply = client.post(CHAT, json=body(messages, 8), headers=headers)
        assert reply.status_code == 200, reply.text
        told.append((request, reply.json()["usage"]))
        messages += [reply.json()["choices"][0]["message"], {"role": "user", "content": "Go on."}]
    return told


def leave(client: httpx.Client, key: str) -> None:
    """Ask for a long answer and go after its first tokens."""
    long = body([{"role": "user", "content": "Count."}], 300, stream=True)
    with client.stream("POST", CHAT, json=long, headers=header(key) | {"x-request-id": "left"}) as reply:
        for number, _ in enumerate(reply.iter_lines()):
            if number == 8:
                return


def check_times(line: RequestRecord) -> None:
    known = [line.arrival_ts, line.submit_ts, line.admit_ts, *line.token_times, line.finish_ts]
    times = [at for at in known if at is not None]
    assert all(before <= after + 2e-6 for before, after in pairwise(times)), line
    assert len(line.every_token_ts) == line.output_tokens
    if line.output_tokens:
        assert line.first_token_ts == pytest.approx(line.token_times[0], abs=2e-6)
        assert line.admit_ts is not None


def check_iterations(lines: list[IterationRecord], pages: int) -> None:
    assert [line.step for line in lines] == list(range(1, len(lines) + 1))
    for line in lines:
        assert line.iteration_ms >= line.model_ms > 0
        assert [group.used + group.cached + group.free for group in line.kv_pages] == [pages]
        assert line.scheduled_tokens >= line.decodes + line.chunks > 0
        assert line.binding_limit in ("", *line.limits)
        assert line.binding_limit not in NO_LIMIT
        assert bool(line.binding_limit) == bool(line.limits.keys() - NO_LIMIT)
    for before, after in pairwise(lines):
        assert after.begin_ts >= before.begin_ts + before.iteration_ms / 1e3 - 1e-5


def check_recording(found: Records, told: dict[str, dict[str, Any]], pages: int) -> None:
    by_request = {line.request: line for line in found.requests}
    assert len(by_request) == len(found.requests)
    for line in found.requests:
        check_times(line)
        assert line.policy == found.opened[0].policy != ""
    for request, usage in told.items():
        line = by_request[request]
        assert (line.tenant, line.route) == (request[0], CHAT)
        assert (line.status, line.reason) == (Status.LENGTH, "length")
        assert (line.prompt_tokens, line.output_tokens) == (
            usage["prompt_tokens"],
            usage["completion_tokens"],
        )
        assert line.prefix_hit_tokens == usage["prompt_tokens_details"]["cached_tokens"]
        assert line.computed_tokens == usage["agentserve"]["computed_tokens"]
        assert line.preemption_count == usage["agentserve"]["preemptions"]
    assert any(line.queue_reasons for line in found.requests), "there was room for one turn at a time"
    assert (by_request["left"].status, by_request["left"].reason) == (Status.CANCELLED, "client_gone")
    assert by_request["left"].output_tokens > 0
    refused = {name: by_request[name] for name in ("bad", "long")}
    assert {line.status for line in refused.values()} == {Status.REJECTED}
    assert refused["long"].reason in ("context_length_exceeded", "request_refused")
    check_iterations(found.iterations, pages)
    steps, left_out = timed_steps(found.iterations)
    assert left_out == 0, "iterations say what was in them"
    assert [step.load.rows for step in steps] == [
        line.scheduled_tokens for line in found.iterations if not line.failed
    ]
    assert whose_steps([found]).threads >= 1
    assert sum(line.preempted for line in found.iterations) >= sum(
        line.preemption_count for line in found.requests
    )
    rows = sum(line.computed_tokens or 0 for line in found.requests)
    assert sum(line.scheduled_tokens for line in found.iterations) >= rows > 0
    assert sum(line.swapped_bytes.out_of for line in found.iterations) > 0


def test_a_server_writes_down_what_became_of_everything(tmp_path: Path) -> None:
    data, recording = tmp_path / "data", tmp_path / "recording"
    file = KeyFile(data / "tenants")
    keys = {name: file.create(name, time.time())[1] for name in ("a", "b")}
    admin = file.create(None, time.time())[1]
    flags = [*FLAGS, "--data-dir", str(data), "--recording", str(recording)]
    with serving(*flags, patience=LIMIT) as (client, process):
        jobs = [(keys[name], f"{name}{number}") for name in "ab" for number in range(2)]
        with concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
            told = dict(chain.from_iterable(pool.map(lambda job: ask(client, *job), jobs)))
        leave(client, keys["a"])
        for name, wrong in (("bad", {"temperature": 99}), ("long", {"messages": [user("word " * 3000)]})):
            fields = body([user("Hi")], 3) | wrong
            reply = client.post(CHAT, json=fields, headers=header(keys["b"]) | {"x-request-id": name})
            assert reply.status_code == 400
        assert client.post(CHAT, json=body([user("Hi")], 3), headers=header("no-key")).status_code == 401
        pages = client.get("/server_info", headers=header(admin)).json()["pages"]
        page = client.get("/metrics", headers=header(admin)).text
        assert client.get("/metrics", headers=header(keys["a"])).status_code == 403
        found = wait_for(recording, lambda found: len(found.requests) == len(told) + 3)
        leave(client, keys["a"])
        process.send_signal(signal.SIGKILL)  # the server is in the middle of something
        process.wait(LIMIT)
        process.returncode = 0
    check_recording(found, told, pages)
    for name in "ab":
        ended = sum(line.tenant == name and line.status is Status.LENGTH for line in found.requests)
        assert f'agentserve_tenant_ended_total{{status="length",tenant="{name}"}} {ended:.1f}' in page
    assert 'agentserve_rejections_total{reason="invalid_api_key"} 1.0' in page
    assert 'agentserve_record_lines_lost_total{series="iterations"} 0.0' in page
    written = b"".join(file.read_bytes() for file in recording.iterdir()).decode()
    for secret in (SECRET, "Fact 7", admin, *keys.values()):
        assert secret not in written
    serve_on_a_full_disk(tmp_path, recording)


def serve_on_a_full_disk(scratch: Path, recording: Path) -> None:
    """The next server, in the folder of one that was killed; soon nothing more can be written there."""
    before = read_records(recording)
    assert before.damaged <= 2  # the last line of each of its files
    most = max(file.stat().st_size for file in recording.iterdir()) + 4096

    def full_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    flags = ["--device-kv", "14MiB", "--recording", str(recording)]
    with (
        open(scratch / "errors", "w+") as errors,
        subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=errors) as log,
    ):
        with serving(*flags, patience=LIMIT, stderr=log.stdin, preexec_fn=full_disk) as (client, _):
            lost = _lost(client)
        assert log.stdin is not None
        log.stdin.close()
    assert min(lost.values()) > 0
    said = [line for line in (scratch / "errors").read_text().splitlines() if "recording ends" in line]
    assert sorted(line.split(" cannot be written")[0].rpartition("/")[2] for line in said) == [
        "iterations.w0.jsonl",
        "requests.jsonl",
    ], said
    after = read_records(recording)
    assert after.damaged == before.damaged
    assert after.requests[: len(before.requests)] == before.requests
    assert len(after.requests) > len(before.requests)
    assert len(after.iterations) > len(before.iterations)


def _lost(client: httpx.Client) -> dict[str, float]:
    """Lines that were not recorded, when both files are full."""
    deadline = time.monotonic() + LIMIT
    while True:
        page = client.get("/metrics").text
        found = re.findall(r'^agentserve_record_lines_lost_total\{series="(\w+)"\} (\S+)', page, re.MULTILINE)
        lost = {series: float(lines) for series, lines in found}
        if min(lost.values()) > 0:
            return lost
        assert time.monotonic() < deadline
        assert client.post(CHAT, json=body([user("Go on")], 2)).status_code == 200
