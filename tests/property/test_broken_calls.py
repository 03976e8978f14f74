"""Calls that are broken anywhere: the same at every cut, nothing half in the text, nothing runnable that is
no JSON, and no more work than the text is long. The rule is the one of `tools_bridge.parser`."""

from __future__ import annotations

import ast
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reply_forms import NAMES, TOOLS, WRITERS, alphabet, form, pieces
from tests.reply_rig import read
from tools_bridge.deltas import CallClosed, CallOpened, ContentDelta, Delta, ReasoningDelta
from tools_bridge.source import Marks, Source

ARGUMENTS = ({}, {"a": "b } </tool_call> é"}, {"a": "", "n": -3, "o": {"k": [1, None, "]"], "z": {}}})
CALL = "｜tool▁call▁"
DSML = "<｜DSML｜(?:function_calls|tool_calls|calls)>"
HEADER = (
    r"(?:<\|start\|>|<\|channel\|>|<\|constrain\|>|to=)"
    r"(?:(?!<\|(?:message|end|call|return)\|>).)*?<\|message\|>"
)
XTAG = r"<\|(?:open|close)\|>(?:(?!<\|(?:sep|open|close)\|>).){0,512}<\|sep\|>"
JSON_ARRAY = r"\[TOOL_CALLS\]|,"


@dataclass(frozen=True)
class Form:
    """What stands around calls, as patterns for texts without blanks. `between`: what may be dropped once
    there was a call, besides what may be dropped anywhere."""

    opening: str
    closing: str
    between: str = "(?!)"
    beside: tuple[str, ...] = ()  # dropped anywhere
    section: str = "(?!)"  # begins something that is dropped, however long it goes on


FORMS = {
    "gpt-oss": Form(
        HEADER,
        r"<\|(?:end|call|return)\|>|(?=<\|start\|>)",
        beside=(HEADER, r"<\|(?:end|call|return|message)\|>", rf"{HEADER}.*?(?:<\|end\|>|(?=<\|start)|$)"),
    ),
    "kimi-k3": Form(
        r"<\|open\|>call",
        r"<\|close\|>call<\|sep\|>",
        between=".",  # in the section of calls
        beside=(XTAG,),
        section=r"<\|open\|>tools",
    ),
    "kimi-k2": Form(
        r"(?:<\|tool_calls_section_begin\|>.*?)?<\|tool_call_begin\|>",
        r"<\|tool_call_end\|>|(?=<\|tool_calls_section_(?:begin|end)\|>)",
        beside=(r"<\|tool_calls_section_begin\|>.*?<\|tool_calls_section_end\|>",),
    ),
    "deepseek-v3": Form(
        f"(?:<｜tool▁calls▁begin｜>)?<{CALL}begin｜>", f"<{CALL}end｜>|(?=<｜tool▁calls▁(?:begin|end)｜>)"
    ),
    "deepseek-v31": Form(
        f"(?:<｜tool▁calls▁begin｜>)?<{CALL}begin｜>", f"<{CALL}end｜>|(?=<｜tool▁calls▁(?:begin|end)｜>)"
    ),
    **dict.fromkeys(
        ("deepseek-v32", "deepseek-v4", "deepseek-v41"),
        Form(
            f"(?:{DSML})?<｜DSML｜invoke",
            "</｜DSML｜invoke>|/>|(?=</?｜DSML｜(?:tool_|function_)?calls>)",
            beside=(f"{DSML}</｜DSML｜(?:tool_|function_)?calls>",),
        ),
    ),
    "mistral": Form(JSON_ARRAY, r"[}\]]", between="[],]"),
    "mistral-v3": Form(JSON_ARRAY, r"[}\]]", between="[],]"),
    "gemma4": Form(r"<\|tool_call>", r"<tool_call\|>"),
    "glm47": Form("<tool_call>", "</tool_call>"),
    "glm45": Form("<tool_call>", "</tool_call>"),
    "qwen3-xml": Form("(?:<tool_call>)?<function=", "</function>|</tool_call>|(?=<tool_call>)"),
    "hermes": Form("<tool_call>", "</tool_call>"),
    "llama4": Form(
        r"(?:<\|python_start\|>)?\[|,|;?\{", r"[})\]]|(?=<\|python_(?:start|tag)\|>)", between="[],;]"
    ),
    "llama3": Form(r"(?:<\|python_tag\|>)?\{|[;,]\{", r"\}|(?=<\|python_tag\|>)", between="[;,]"),
}


def whole(name: str, text: str, inside: bool) -> list[Delta]:
    parser = form(name).parser(TOOLS, inside=inside)
    return [*parser.feed(text), *parser.finish()]


def bare(text: str) -> str:
    return re.sub(r"[ \t\r\n]+", "", text)


def shown(deltas: list[Delta]) -> list[str | bool]:
    """What was told, in order: characters, and for each call whether it was whole."""
    told: list[str | bool] = []
    for delta in deltas:
        match delta:
            case ContentDelta(text) | ReasoningDelta(text):
                told += bare(text)
            case CallClosed(_, error):
                told.append(not error)
            case _:
                pass
    return told


class Account:
    """Whether a text is what was told of it, in order, with nothing left out but what may be."""

    def __init__(self, name: str, text: str) -> None:
        reply, self._form = form(name), FORMS[name]
        self._text = bare(text)
        marks = {*reply.markers, *((reply.think.open, reply.think.close) if reply.think else ())}
        dropped = [re.escape(bare(mark)) for mark in marks]
        closers = reply.family.calls.closers if reply.family.calls else ()
        late = [re.escape(bare(mark)) for mark in closers]
        self._beside = [re.compile(p, re.DOTALL) for p in (*dropped, *self._form.beside)]
        self._between = [re.compile(p, re.DOTALL) for p in (*late, self._form.between)]
        self._section = re.compile(self._form.section)
        self._opening = re.compile(self._form.opening, re.DOTALL)
        # A whole call may end with its last bracket, or where its text does; a broken one only with a mark.
        ends = self._form.closing
        self._broken = re.compile(rf"(?:{ends})", re.DOTALL)
        self._whole = re.compile(rf"(?:{ends}|\}}(?:```)?)", re.DOTALL)

    def holds(self, told: list[str | bool]) -> bool:
        seen: set[tuple[int, int]] = set()
        todo = [(0, 0)]
        first = next((at for at, item in enumerate(told) if isinstance(item, bool)), len(told))
        while todo:
            place = todo.pop()
            if place in seen:
                continue
            seen.add(place)
            at, done = place
            if at == len(self._text) and done == len(told):
                return True
            if done < len(told):
                item = told[done]
                if isinstance(item, bool):
                    todo += [(end, done + 1) for end in self._ends(at, item)]
                elif self._text.startswith(item, at):
                    todo.append((at + 1, done + 1))
            if begun := self._section.match(self._text, at):
                todo += [(end, done) for end in range(begun.end(), len(self._text) + 1)]
            patterns = [*self._beside, *(self._between if done > first else ())]
            todo += [(m.end(), done) for p in patterns if (m := p.match(self._text, at)) and m.end() > at]
        return False

    def _ends(self, at: int, complete: bool) -> Iterator[int]:
        opened = self._opening.match(self._text, at)
        if opened is None:
            return
        yield len(self._text)
        ends = self._whole if complete else self._broken
        for found in ends.finditer(self._text, opened.end()):
            yield found.end()
        for found in self._opening.finditer(self._text, opened.end()):
            yield found.start()


@st.composite
def broken(draw: st.DrawFn, name: str) -> str:
    """A reply with calls in it, broken in one to three places."""
    parts = ["", *(draw(st.sampled_from(["", "Öl.", " ok\n"])) for _ in range(2))]
    calls = [WRITERS[name]("f", draw(st.sampled_from(ARGUMENTS))) for _ in range(2)]
    text = parts[1] + calls[0] + (parts[2] + calls[1] if draw(st.booleans()) else parts[2])
    for _ in range(draw(st.integers(1, 3))):
        i, j = sorted(draw(st.integers(0, len(text))) for _ in range(2))
        match draw(st.sampled_from(["delete", "one", "insert", "swap", "cut", "repeat"])):
            case "delete":
                text = text[:i] + text[j:]
            case "one":
                text = text[:i] + text[i + 1 :]
            case "insert":
                text = text[:i] + draw(st.sampled_from(alphabet(name))) + text[i:]
            case "swap":
                k = draw(st.integers(j, len(text)))
                text = text[:i] + text[j:k] + text[i:j] + text[k:]
            case "cut":
                text = text[:j]
            case _:
                text = text[:j] + text[i:j] + text[j:]
    return text


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_a_broken_call_is_told_by_the_rule(name: str, data: Any) -> None:
    text = data.draw(broken(name))
    inside = data.draw(st.booleans()) and form(name).think is not None
    deltas = whole(name, text, inside)
    parsed = read(form(name).parser(TOOLS, inside=inside), [text])
    # The same at every split, and so streamed or not.
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    bounds = [0, *cuts, len(text)]
    split = [text[a:b] for a, b in pairwise(bounds)]
    assert read(form(name).parser(TOOLS, inside=inside), split) == parsed
    assert read(form(name).parser(TOOLS, inside=inside), list(text)) == parsed
    # A whole call can be run; none other claims to be one.
    for call in parsed.calls:
        assert call.complete == (not call.error)
        assert call.name
        if call.complete:
            assert isinstance(json.loads(call.arguments, parse_constant=pytest.fail), dict)
    # Content, reasoning and calls account for the text.
    told = shown(deltas)
    assert Account(name, text).holds(told), (text, deltas)
    if not any(isinstance(delta, CallOpened) for delta in deltas):
        assert not parsed.truncated or parsed.cut


class Work:
    """Counts the characters that a parser looks at."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.done = 0
        find, push, loads, parse = Marks.find, Source.push, json.loads, ast.parse

        def counted_find(marks: Marks, text: str, at: int) -> re.Match[str] | None:
            found = find(marks, text, at)
            self.done += (found.end() if found else len(text)) - at + 1
            return found

        def counted_push(source: Source, text: str) -> None:
            push(source, text)
            self.done += len(source.text)

        def counted_loads(text: str, **kwargs: Any) -> Any:
            self.done += len(text)
            return loads(text, **kwargs)

        def counted_parse(text: str, **kwargs: Any) -> Any:
            self.done += len(text)
            return parse(text, **kwargs)

        patch.setattr(Marks, "find", counted_find)
        patch.setattr(Source, "push", counted_push)
        patch.setattr(json, "loads", counted_loads)
        patch.setattr(ast, "parse", counted_parse)

    def of(self, name: str, text: str, size: int) -> int:
        self.done = 0
        parser = form(name).parser(TOOLS)
        for piece in pieces(text, size):
            parser.feed(piece)
        parser.finish(cut=True)
        return self.done


def hostile(name: str) -> Iterator[str]:
    """What is said again and again: beginnings of calls, and what goes on for ever within one."""
    call = WRITERS[name]("f", {"a": "b", "o": {"k": [1]}})
    rng = random.Random(name)
    for _ in range(4):
        yield call[: rng.randrange(1, len(call))]
    yield "".join(rng.choices(alphabet(name), k=3))
    yield call


@pytest.mark.parametrize("name", NAMES)
def test_the_work_is_linear_in_the_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(monkeypatch)
    for begun in hostile(name):
        head = "" if begun[0] != "{" else begun
        half = head + begun * (50_000 // len(begun))
        once, twice = (work.of(name, text, 12) for text in (half, half + half))
        assert twice <= 100_000 * 24, begun
        assert twice <= 2.2 * once + 1000, begun
    endless = WRITERS[name]("f", {"a": "A"}).split("A")[0]
    assert work.of(name, endless + "x <" * 33_000, 12) <= 100_000 * 24
