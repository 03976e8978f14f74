"""The worker's loop over a real core, a real socket pair and a simulated executor; and its recorded log."""

from __future__ import annotations

import io
import socket
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import msgspec
import pytest

from agentserve.clock import VirtualClock
from agentserve.core.config import CoreConfig
from agentserve.core.engine import EngineCore
from agentserve.core.plan import ChunkResult, Plan, Sampled, StepResult
from agentserve.core.record import (
    Commanded,
    Failed,
    Finished,
    Opened,
    Planned,
    decode_entries,
    encode_entry,
    plan_digest,
)
from agentserve.messages import (
    Abort,
    Command,
    DefineGrammar,
    Describe,
    Description,
    DropGrammar,
    Event,
    Park,
    RunCounts,
    Shutdown,
    StepDone,
    Submit,
    Token,
    ToolSignal,
    TurnEnded,
    pack_tokens,
)
from agentserve.records.lines import IterationRecord, Swapped
from agentserve.server.workers.iterations import IterationLog
from agentserve.server.workers.link import FrameDecoder, WorkerLink, encode_frame
from agentserve.server.workers.loop import STEP_FAILED, WorkerLoop
from agentserve.server.workers.recorder import Recorder
from agentserve.types import FinishReason, KVGroup, Sampling, SessionId, TurnId
from tiering.policy.base import Signal

CONFIG = CoreConfig(page_size=4, max_model_len=64, max_num_seqs=4, max_batched_tokens=8)
GROUPS, PAGES = (KVGroup("full", (0,), 1),), (40,)


class Executor:
    """Samples the sum of all tokens so far, modulo 97."""

    def __init__(self) -> None:
        self.grammars: list[str] = []
        self.error = ""
        self.poison: int | None = None  # a step with this token fails
        self.computing: Callable[[], None] = lambda: None

    def when_computing(self, call: Callable[[], None]) -> None:
        self.computing = call

    def run(self, plan: Plan) -> StepResult:
        self.computing()
        if self.error:
            raise RuntimeError(self.error)
        if any(self.poison in chunk.tokens for chunk in plan.chunks):
            raise RuntimeError("poisoned")
        results = []
        for chunk in plan.chunks:
            sampled = None
            if chunk.sample:
                sampled = Sampled(sum(chunk.sample.history[: chunk.sample.length]) % 97)
            results.append(ChunkResult(chunk.session, chunk.turn, chunk.epoch, len(chunk.tokens), sampled))
        return StepResult(plan.step, tuple(results), 0.0)

    def define_grammar(self, grammar_id: str, compiled: str) -> None:
        if compiled == "bad":
            raise ValueError("does not parse")
        self.grammars.append(grammar_id)

    def drop_grammar(self, grammar_id: str) -> None:
        self.grammars.remove(grammar_id)


class Ticking(VirtualClock):
    """Every look at it moves it on, so that times in the log differ."""

    def now(self) -> float:
        self.advance_to(super().now() + 0.5)
        return super().now()


class Lines:
    """A recording, in place of a file."""

    lost = 0

    def __init__(self) -> None:
        self.lines: list[IterationRecord] = []

    def add(self, line: IterationRecord) -> None:
        self.lines.append(line)


class Worker:
    """A loop in a thread, and the API process's end of its socket."""

    def __init__(
        self,
        pages: tuple[int, ...] = PAGES,
        *,
        recorded: bool = False,
        overlap: bool = False,
        executor: Executor | None = None,
        runs: Callable[[], RunCounts] | None = None,
    ) -> None:
        ours, self.peer = socket.socketpair(socket.AF_UNIX)
        self.peer.settimeout(20)
        self.executor = executor or Executor()
        self.log = io.BytesIO()
        groups = GROUPS * len(pages)
        self.core = EngineCore(CONFIG, groups, pages)
        self.link = WorkerLink(ours)
        self.log.write(encode_entry(Opened(1, msgspec.msgpack.encode(CONFIG), groups, pages)))
        self.recorded = Lines()
        loop = WorkerLoop(
            self.core, self.executor, self.link, clock=Ticking(), recorder=Recorder(self.log),
            iterations=IterationLog(self.recorded) if recorded else None,  # type: ignore[arg-type]
            when_computing=self.executor.when_computing if overlap else None, runs=runs,
        )  # fmt: skip
        self.thread = threading.Thread(target=loop.run)
        self.frames = FrameDecoder(msgspec.msgpack.Decoder(Event))
        self.steps: list[StepDone] = []

    def send(self, *commands: Command) -> None:
        self.peer.sendall(b"".join(encode_frame(command) for command in commands))

    def until_ended(self, count: int = 1) -> list[TurnEnded]:
        ended: list[TurnEnded] = []
        while len(ended) < count:
            self.read()
            ended = [event for event in self.events() if isinstance(event, TurnEnded)]
        return ended

    def read(self) -> None:
        for event in self.frames.feed(self.peer.recv(65536)):
            assert isinstance(event, StepDone)
            self.steps.append(event)

    def events(self) -> list[object]:
        return [event for step in self.steps for event in step.events]


@contextmanager
def running(worker: Worker) -> Iterator[Worker]:
    worker.thread.start()
    yield worker
    worker.peer.close()
    worker.thread.join(20)
    assert not worker.thread.is_alive()
    worker.link.close()


@pytest.fixture(params=[False, True], ids=["in turn", "overlap"])
def worker(request: pytest.FixtureRequest) -> Iterator[Worker]:
    with running(Worker(overlap=request.param)) as worker:
        yield worker


@pytest.fixture(params=[False, True], ids=["in turn", "overlap"])
def recorded(request: pytest.FixtureRequest) -> Iterator[Worker]:
    with running(Worker(recorded=True, overlap=request.param)) as worker:
        yield worker


def submit(session: str, prompt: list[int], count: int, grammar: str | None = None) -> Submit:
    tokens = pack_tokens(array("i", prompt))
    return Submit(SessionId(session), TurnId(1), tokens, Sampling(max_tokens=count, grammar=grammar))


def expected(prompt: list[int], count: int) -> list[int]:
    history = list(prompt)
    for _ in range(count):
        history.append(sum(history) % 97)
    return history[len(prompt) :]


def test_a_turn_runs_to_its_end_with_one_frame_per_step(worker: Worker) -> None:
    prompt = list(range(1, 20))
    worker.send(submit("a", prompt, 5))
    (ended,) = worker.until_ended()
    assert ended.reason is FinishReason.LENGTH
    assert [event.token for event in worker.events() if isinstance(event, Token)] == expected(prompt, 5)
    ran = [entry for entry in decode_entries(worker.log.getvalue()) if isinstance(entry, Finished)]
    assert len(ran) == 3 + 4  # 19 tokens in chunks of at most 8, then one token per step
    assert all(step.worker is not None for step in worker.steps)


def test_commands_are_served_while_turns_run_and_when_idle(worker: Worker) -> None:
    worker.send(submit("a", [1, 2], 40), submit("b", [3], 2), Describe(7, SessionId("a")))
    worker.until_ended(2)
    worker.send(Describe(8))
    while not any(isinstance(event, Description) and event.request == 8 for event in worker.events()):
        worker.read()
    answers = [event for event in worker.events() if isinstance(event, Description)]
    assert [answer.request for answer in answers] == [7, 8]
    assert answers[0].session is not None


def test_a_failed_step_fails_its_turns_and_the_worker_goes_on(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    worker.executor.error = "out of\nmemory, of B's"
    worker.send(submit("a", [1, 2], 4))
    (ended,) = worker.until_ended()
    assert (ended.reason, ended.error) == (FinishReason.ERROR, STEP_FAILED)
    assert "memory, of B's" in caplog.text  # for the operator alone: a step is many tenants'
    assert "failed, of ['a']" in caplog.text
    assert b"B's" not in worker.log.getvalue()
    worker.executor.error = ""
    worker.send(submit("b", [1, 2], 4))
    worker.until_ended(2)
    assert [event.token for event in worker.events() if isinstance(event, Token)] == expected([1, 2], 4)


def test_a_step_that_fails_with_work_ahead_is_run_again_without_it(worker: Worker) -> None:
    prompt, more = [1, 2, 3], [50] * 9
    worker.send(submit("a", prompt, 2))
    worker.until_ended()
    context = prompt + expected(prompt, 2)
    worker.executor.poison = 50
    told = pack_tokens(array("i", context + more))
    worker.send(
        Park(SessionId("a"), TurnId(1), waiting_tool=True),
        submit("b", [1, 2], 9),
        ToolSignal(SessionId("a"), TurnId(1), Signal.STREAMING, told),
    )
    assert worker.until_ended(2)[-1].reason is FinishReason.LENGTH
    said = [event.token for event in worker.events() if isinstance(event, Token) and event.session == "b"]
    assert said == expected([1, 2], 9)
    entries = list(decode_entries(worker.log.getvalue()))
    assert [entry.error for entry in entries if isinstance(entry, Failed)] == [STEP_FAILED]
    replay(worker.log.getvalue())


def test_grammars_are_defined_dropped_and_unknown_ones_refused(worker: Worker) -> None:
    worker.send(
        DefineGrammar("good", "{}"),
        DefineGrammar("broken", "bad"),
        submit("a", [1], 1, "good"),
        submit("b", [1], 1, "broken"),
    )
    reasons = {event.session: event.reason for event in worker.until_ended(2)}
    assert reasons == {"a": FinishReason.LENGTH, "b": FinishReason.REFUSED}
    worker.send(DropGrammar("good"), DropGrammar("never"), submit("c", [1], 1, "good"))
    assert worker.until_ended(3)[-1].reason is FinishReason.REFUSED
    assert worker.executor.grammars == []


def test_shutdown_ends_the_loop(worker: Worker) -> None:
    worker.send(Shutdown())
    worker.thread.join(20)
    assert not worker.thread.is_alive()


def test_a_bad_frame_ends_the_loop(worker: Worker, caplog: pytest.LogCaptureFixture) -> None:
    worker.peer.sendall(b"\0\0\0\3bad")
    worker.thread.join(20)
    assert not worker.thread.is_alive()
    assert "bad frame" in caplog.text


def replay(data: bytes) -> tuple[list[bytes], list[object]]:
    """Feed a log into a new core; the plan digests and events it gives."""
    entries = decode_entries(data)
    opened = next(entries)
    assert isinstance(opened, Opened)
    config = msgspec.msgpack.decode(opened.config, type=CoreConfig)
    core = EngineCore(config, opened.groups, opened.pages)
    plan, digests, events = None, [], []
    for entry in entries:
        match entry:
            case Commanded():
                core.handle(entry.command, entry.now)
            case Planned():
                plan = core.begin_step(entry.now)
                digests.append(plan_digest(plan))
                assert digests[-1] == entry.plan
            case Finished():
                core.finish_step(entry.result, entry.now)
            case Failed():
                assert plan is not None
                core.fail_step(plan, entry.error, entry.now)
        events += core.take_events()
    return digests, events


def test_a_recorded_log_replays_to_the_same_plans_and_events(worker: Worker) -> None:
    worker.send(submit("a", list(range(1, 30)), 12), submit("b", list(range(1, 9)), 9))
    worker.send(submit("c", [5], 50), Abort(SessionId("c"), TurnId(1)))
    worker.until_ended(3)
    worker.executor.error = "broken"
    worker.send(submit("d", [1, 2, 3], 4))
    worker.until_ended(4)
    worker.peer.close()
    worker.thread.join(20)
    digests, events = replay(worker.log.getvalue())
    assert events == worker.events()
    assert len([digest for digest in digests if digest]) > 12
    cut = replay(worker.log.getvalue()[:-3])  # killed while writing: all but the last entry is there
    assert cut[0] in (digests, digests[:-1])


def test_a_digest_covers_what_an_executor_acts_on() -> None:
    def plan(length: int) -> Plan | None:
        core = EngineCore(CONFIG, GROUPS, PAGES)
        core.handle(submit("a", [1, 2, 3][:length], 4), 0.0)
        return core.begin_step(0.0)

    assert plan_digest(plan(1)) == plan_digest(plan(1))
    assert plan_digest(plan(1)) != plan_digest(plan(2))
    assert plan_digest(None) == b""


# --- what is recorded of steps ------------------------------------------------------------------


def test_every_step_that_ran_is_recorded_with_what_it_was(recorded: Worker) -> None:
    recorded.send(submit("a", list(range(1, 20)), 5), submit("b", [1, 2, 3], 9))
    recorded.until_ended(2)
    lines = recorded.recorded.lines
    ran = [entry for entry in decode_entries(recorded.log.getvalue()) if isinstance(entry, Finished)]
    assert [line.step for line in lines] == [entry.result.step for entry in ran]
    assert [line.scheduled_tokens for line in lines] == [
        sum(chunk.computed for chunk in entry.result.chunks) for entry in ran
    ]
    assert sum(line.decodes + line.chunks for line in lines) == sum(len(entry.result.chunks) for entry in ran)
    assert all(line.iteration_ms >= line.model_ms >= 0 for line in lines)
    assert all(before.begin_ts < after.begin_ts for before, after in pairwise(lines))
    assert all(pages.used + pages.cached + pages.free == 40 for line in lines for pages in line.kv_pages)
    assert lines[0].binding_limit == "tokens"
    assert lines[-1].limits == {}
    assert {line.swapped_bytes for line in lines} == {Swapped()}
    assert not any(line.failed for line in lines)


def test_pages_are_told_by_group_and_preemptions_with_their_step() -> None:
    with running(Worker((9, 12), recorded=True)) as worker:
        worker.send(submit("a", [1, 2, 3], 25), submit("b", [4, 5, 6], 25))
        ended = worker.until_ended(2)
        lines = worker.recorded.lines
    assert all(
        [pages.used + pages.cached + pages.free for pages in line.kv_pages] == [9, 12] for line in lines
    )
    preempted = [line for line in lines if line.preempted]
    assert sum(line.preempted for line in lines) == sum(event.usage.preemptions for event in ended) > 0
    assert all(line.limits["preempted"] == line.preempted for line in preempted)
    held = {event.session: event.usage.held for event in ended}
    assert held[SessionId("b")]["preempted"] == 1
    assert sum(held[SessionId("b")].values()) > 1  # it waited for pages, too
    assert held[SessionId("a")] == {}


def test_a_turn_is_told_for_how_many_steps_what_kept_it_waiting(recorded: Worker) -> None:
    recorded.send(*(submit(name, [number], 6) for number, name in enumerate("abcde", 1)))
    ended = {event.session: event.usage.held for event in recorded.until_ended(5)}
    full = sum(line.limits.get("seats", 0) for line in recorded.recorded.lines)
    assert full > 0
    assert ended == {**{name: {} for name in "abcd"}, "e": {"seats": full}}


def test_a_failed_step_is_recorded_as_such(recorded: Worker) -> None:
    recorded.executor.error = "out of memory"
    recorded.send(submit("a", [1, 2], 4))
    recorded.until_ended()
    assert [(line.failed, line.scheduled_tokens) for line in recorded.recorded.lines] == [(True, 2)]


def test_lines_that_were_lost_are_told_to_the_server(recorded: Worker) -> None:
    recorded.recorded.lost = 3
    recorded.send(Describe(1), submit("a", [1], 1))
    recorded.until_ended()
    views = [event.worker for event in recorded.events() if isinstance(event, Description)]
    views += [step.worker for step in recorded.steps if step.worker is not None]
    assert {view.unrecorded for view in views} == {3}
    assert len(views) > 1


def test_how_steps_were_run_is_told_with_every_view_of_the_worker() -> None:
    with running(Worker(runs=lambda: RunCounts(5, 1, 2))) as worker:
        worker.send(Describe(1), submit("a", [1], 1))
        worker.until_ended()
    views = [event.worker for event in worker.events() if isinstance(event, Description)]
    told = [step.worker for step in worker.steps if step.worker is not None]
    assert views
    assert told
    assert {view.runs for view in views + told} == {RunCounts(5, 1, 2)}
