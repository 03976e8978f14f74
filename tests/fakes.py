"""A scripted engine and a byte-level chat model, for tests of the HTTP side."""

from __future__ import annotations

import asyncio
import codecs
import hashlib
import json
from array import array
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from agentserve.messages import (
    Park,
    SessionView,
    StateChange,
    Submit,
    Token,
    TurnEnded,
    TurnUsage,
    WorkerView,
    unpack_tokens,
)
from agentserve.server.engine_port import (
    EngineDown,
    FleetHealth,
    FleetView,
    Hear,
    News,
    SeenSession,
    TierReport,
    TurnEvent,
)
from agentserve.types import FinishReason, SessionId, SessionState, TurnId
from tests.hello import made_up_hello
from tiering.policy.base import Hints

START, END, EOS = 256, 257, 258
CONTROL = {"<|im_start|>": START, "<|im_end|>": END, "<|endoftext|>": EOS}


class ByteDetokenizer:
    def __init__(self, hidden: Collection[int]) -> None:
        self._hidden = hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        if token in self._hidden:
            return ""
        return self._decoder.decode(ByteTokenizer.token_bytes[token])

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class ByteTokenizer:
    """One token per byte, and three control tokens."""

    vocab_size = 259
    eos_ids = (EOS,)
    control = CONTROL
    token_bytes = [bytes([i]) for i in range(256)] + [name.encode() for name in CONTROL]

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def apart(self, owner: str) -> ByteTokenizer:
        return self

    def encode_completion(self, text: str) -> list[int]:
        return self.encode(text)

    def decode(self, ids: Iterable[int], skip_control: bool = True) -> str:
        fold = self.detokenizer(skip_control=skip_control)
        return "".join([*map(fold.push, ids), fold.flush()])

    def detokenizer(self, *, skip_control: bool = True, continues: bool = False) -> ByteDetokenizer:
        return ByteDetokenizer(CONTROL.values() if skip_control else ())


class ByteTemplate:
    """ChatML over bytes; calls are rendered as JSON, tools in front."""

    stop_ids = (END,)

    def apart(self, owner: str) -> ByteTemplate:
        return self

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
        spliced: Mapping[int, Sequence[int]] = {},
        tails: Mapping[int, str] = {},
    ) -> array[int]:
        ids: list[int] = []
        if tools:
            ids += json.dumps(tools).encode()
        for index, message in enumerate(messages):
            if "BREAK" in str(message["content"]):
                raise ValueError(f"messages[{index}]: this template cannot say BREAK")
            ids += [START, *message["role"].encode(), 10]
            ids += spliced[index] if index in spliced else flat(message).encode()
            if not (continue_final_message and index == len(messages) - 1):
                ids += [END, 10]
        if add_generation_prompt:
            ids += [START, *b"assistant\n"]
        return array("i", ids)

    def tail(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> str:
        return ""


def flat(message: Mapping[str, Any]) -> str:
    content = message["content"] or ""
    if not isinstance(content, str):
        content = "".join(part["text"] for part in content)
    calls = [
        "<tool_call>\n"
        + json.dumps(
            {"name": c["function"]["name"], "arguments": json.loads(c["function"]["arguments"] or "{}")}
        )
        + "\n</tool_call>"
        for c in message.get("tool_calls", ())
    ]
    return content + "".join(calls)


def chain(parent: bytes, message: Mapping[str, Any]) -> bytes:
    fields = [message["role"], flat(message), message.get("tool_call_id") or ""]
    return hashlib.sha256(parent + json.dumps(fields).encode()).digest()


class NoGrammars:
    """Takes any form; keeps what was asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def source(self, form: Any, prompt_end: str, owner: str = "") -> Any:
        self.asked.append(form)
        if form.schema is not None and form.schema.get("type") == "nonsense":
            raise ValueError("type 'nonsense' is not a JSON type")
        return SimpleNamespace(id=f"g{len(self.asked)}")

    def cached(self, source: Any) -> str | None:
        return None

    def compile(self, source: Any) -> str:
        return "{}"

    def close(self) -> None:
        pass


@dataclass
class Script:
    """What one turn generates. A turn stops before token `hold_at` until `release` is set."""

    ids: Sequence[int]
    reason: FinishReason = FinishReason.STOP
    error: str = ""
    wait: float = 0.0  # with SHED
    kept: tuple[str, ...] = ()  # promises
    missed: tuple[str, ...] = ()
    relegated: bool = False
    eos: bool = True  # an end token follows where the reason is STOP
    hold_at: int | None = None
    release: asyncio.Event = field(default_factory=asyncio.Event)


def say(text: str, **more: Any) -> Script:
    return Script(list(text.encode()), **more)


class ScriptedEngine:
    """An engine that says what it is told, by the worker's rules for ends, stops and limits."""

    def __init__(
        self, reply: Callable[[Submit], Script] | Script | None = None, max_model_len: int = 4096
    ) -> None:
        self.reply = reply or say("Hello!")
        self.hello = made_up_hello(max_model_len=max_model_len)
        self.alive = 1
        self.submits: list[Submit] = []
        self.live: dict[tuple[SessionId, TurnId], asyncio.Event] = {}
        self.aborted: list[tuple[SessionId, TurnId]] = []
        self.order: list[str] = []  # what was said, by name
        self.parked: list[tuple[SessionId, TurnId, bool]] = []
        self.tools: list[tuple[str, ...]] = []  # of each park
        self.hints: list[Hints] = []  # of each park
        self.hear: Hear | None = None  # who hears of decisions
        self.lost: set[SessionId] = set()  # sessions whose worker died
        self.news: list[News] = []
        self.forked: list[tuple[SessionId, SessionId, int]] = []
        self.closed: list[SessionId] = []
        self.grammars: dict[str, str] = {}
        self.resets = 0
        self.tier_reports: tuple[TierReport, ...] = ()
        self.views: dict[SessionId, SessionView] = {}  # of sessions; what is not here is made up
        self._cached: list[tuple[str, array[int]]] = []  # by namespace

    def submit(self, command: Submit) -> AsyncIterator[TurnEvent]:
        if not self.alive:
            raise EngineDown("no worker is left")
        assert (command.session, command.turn) not in self.live, "a turn runs twice"
        self.submits.append(command)
        stop = self.live[(command.session, command.turn)] = asyncio.Event()
        script = self.reply(command) if callable(self.reply) else self.reply
        return self._run(command, script, stop)

    def abort(self, session: SessionId, turn: TurnId) -> None:
        if (session, turn) in self.live:
            self.aborted.append((session, turn))
            self.order.append("abort")
            self.live[(session, turn)].set()
            del self.live[(session, turn)]

    def park(self, command: Park) -> None:
        self.parked.append((command.session, command.turn, command.waiting_tool))
        self.tools.append(command.tools)
        self.hints.append(command.hints)
        self.order.append("park")

    def holds(self, session: SessionId) -> bool:
        return session not in self.lost

    def on_decisions(self, hear: Hear) -> None:
        self.hear = hear

    def tell(self, news: News) -> None:
        self.news.append(news)
        self.order.append(type(news).__name__.lower())

    def fork(self, session: SessionId, child: SessionId, length: int) -> None:
        self.forked.append((session, child, length))

    def close(self, session: SessionId) -> None:
        self.closed.append(session)
        for key in [key for key in self.live if key[0] == session]:
            self.abort(*key)

    async def define_grammar(self, grammar_id: str, compiled: str) -> None:
        self.grammars[grammar_id] = compiled

    async def describe(self, session: SessionId | None = None) -> FleetView:
        view = self.views.get(session) if session is not None else None
        known = [s for s in self.submits if s.session == session]
        if view is None and session is not None and known:
            size = len(known[-1].tokens) // 4
            view = SessionView(session, SessionState.IDLE, known[-1].turn, size, size, -(-size // 16), 0)
        tiers = self.tier_reports[0].view if self.tier_reports else None
        return FleetView((WorkerView(len(self.live), 0, 1, 64, 40, 20, 4, tiers),), view)

    async def describe_sessions(self, sessions: Sequence[SessionId]) -> dict[SessionId, SeenSession]:
        views = [(await self.describe(session)).session for session in sessions if self.alive]
        return {view.session: SeenSession(view, 0.0) for view in views if view is not None}

    def health(self) -> FleetHealth:
        return FleetHealth(1, self.alive)

    def tiers(self) -> tuple[TierReport, ...]:
        return self.tier_reports

    async def reset_prefix_cache(self) -> bool:
        self.resets += 1
        return True

    async def _run(self, command: Submit, script: Script, stop: asyncio.Event) -> AsyncIterator[TurnEvent]:
        prompt = unpack_tokens(command.tokens)
        same = (old for space, old in self._cached if space == command.namespace)
        cached = max((shared(old, prompt) for old in same), default=0)
        cached = min(cached, len(prompt) - 1)
        session, turn, sampling = command.session, command.turn, command.sampling
        at = 0.0
        ids: list[int] = []

        def change(state: SessionState, reason: str = "") -> StateChange:
            nonlocal at
            at += 1.0
            return StateChange(session, turn, state, at, reason)

        def ended(reason: FinishReason, error: str = "") -> TurnEnded:
            self.live.pop((session, turn), None)
            if reason in (FinishReason.STOP, FinishReason.LENGTH):
                self._cached.append((command.namespace, prompt + array("i", ids)))
            usage = TurnUsage(
                len(prompt), cached, len(ids), len(prompt) - cached + len(ids), 0, 0.0, 0.5, 1.0, 2.0,
                kept=script.kept, missed=script.missed, relegated=script.relegated,
            )  # fmt: skip
            return TurnEnded(session, turn, reason, usage, error, script.wait)

        if script.reason in (FinishReason.REFUSED, FinishReason.SHED):
            yield ended(script.reason, script.error)
            return
        yield change(SessionState.WAITING)
        yield change(SessionState.PREFILLING)
        ends = {*sampling.stop_token_ids} | (set() if sampling.ignore_eos else {END, EOS})
        plan = [*script.ids, END] if script.eos and script.reason is FinishReason.STOP else list(script.ids)
        for index, token in enumerate(plan):
            if script.hold_at == index:
                hold = asyncio.ensure_future(script.release.wait())
                quit_ = asyncio.ensure_future(stop.wait())
                try:
                    await asyncio.wait({hold, quit_}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    hold.cancel()
                    quit_.cancel()
            await asyncio.sleep(0)
            if stop.is_set():
                ids.clear()
                yield ended(FinishReason.ABORTED)
                return
            if index == 0:
                yield change(SessionState.DECODING)
            ids.append(token)
            top = tuple((t, -0.5 - t / 1000) for t in range(sampling.logprobs or 0))
            yield Token(session, turn, index, token, None if sampling.logprobs is None else -0.25, top)
            if len(ids) >= sampling.min_tokens:
                text = bytes(t for t in ids if t < 256) if sampling.stop else b""
                if token in ends or any(s.encode() in text for s in sampling.stop):
                    yield change(SessionState.IDLE, "stop")
                    yield ended(FinishReason.STOP)
                    return
            if len(ids) >= sampling.max_tokens:
                yield change(SessionState.IDLE, "length")
                yield ended(FinishReason.LENGTH)
                return
        yield change(SessionState.IDLE, script.reason.value)
        yield ended(script.reason, script.error)


def shared(left: Sequence[int], right: Sequence[int]) -> int:
    for i, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return i
    return min(len(left), len(right))
