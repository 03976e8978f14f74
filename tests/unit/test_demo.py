"""The demo judges what it sees, and draws it; a scripted server stands in for the real one."""

from __future__ import annotations

import io
import json
from typing import Any

import httpx
import pytest
from rich.console import Console

from agentserve.cli import demo_story as story
from agentserve.cli.chat import ChatError
from agentserve.cli.demo import run
from agentserve.cli.timeline import WIDTH, marked, rows, timeline

HISTORY = [
    {"state": "WAITING", "at": 100.0, "turn": 1, "reason": ""},
    {"state": "PREFILLING", "at": 100.5, "turn": 1, "reason": ""},
    {"state": "DECODING", "at": 102.5, "turn": 1, "reason": ""},
    {"state": "WAITING_TOOL", "at": 103.0, "turn": 1, "reason": ""},
    {"state": "IDLE", "at": 110.0, "turn": 2, "reason": ""},
]


class Script:
    """A server that plays one session: `cached` tokens of the second prompt are hits."""

    def __init__(self, cached: int = 1960, state: str = "WAITING_TOOL", session: str = "s1") -> None:
        self.cached = cached
        self.state = state
        self.session = session
        self.requests: list[dict[str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        match request.url.path:
            case "/health":
                return httpx.Response(200, json={"page_size": 16})
            case "/v1/models":
                return httpx.Response(200, json={"data": [{"id": "m"}]})
            case "/v1/chat/completions":
                self.requests.append(json.loads(request.content))
                resumed = len(self.requests) == 2
                name = self.session if resumed else "s1"
                body = self.second() if resumed else self.first()
                return httpx.Response(200, content=body, headers={"x-session-id": name})
            case _:
                return httpx.Response(200, json={"state": self.state, "history": HISTORY})

    def first(self) -> bytes:
        call = {"index": 0, "id": "c1", "function": {"name": "look_up_order", "arguments": ""}}
        pieces = [
            {"delta": {"tool_calls": [call]}, "token_ids": [5, 6]},
            {
                "delta": {"tool_calls": [{"index": 0, "function": {"arguments": '{"order": "B2'}}]},
                "token_ids": [7],
            },
            {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": '0417"}'}}]}, "token_ids": [8]},
        ]
        return stream(pieces, 1920, 0, 40)

    def second(self) -> bytes:
        return stream([{"delta": {"content": "It is ready."}}], 2050, self.cached, 12)


def stream(pieces: list[dict[str, Any]], prompt: int, cached: int, generated: int) -> bytes:
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "prompt_tokens_details": {"cached_tokens": cached},
        "agentserve": {"ttft_seconds": 0.25},
    }
    data = [{"choices": [piece]} for piece in pieces] + [{"choices": [], "usage": usage}]
    return "".join(f"data: {json.dumps(event)}\n\n" for event in data).encode() + b"data: [DONE]\n\n"


def play(script: Script) -> tuple[str, str]:
    client = httpx.Client(base_url="http://server", transport=httpx.MockTransport(script))
    out = io.StringIO()
    return run(client, Console(file=out, width=100), 0.0), out.getvalue()


def test_the_story_is_told_and_the_resume_accepted() -> None:
    script = Script()
    problem, out = play(script)
    assert problem == ""
    for piece in ("[5, 6, 7, 8]", "WAITING_TOOL", "It is ready.", "1,960", "computed 90 of 2,050", "250 ms"):
        assert piece in out
    first, second = script.requests
    assert first["tool_choice"]["function"]["name"] == "look_up_order"
    assert [message["role"] for message in second["messages"]] == ["system", "user", "assistant", "tool"]
    assert second["messages"][3]["tool_call_id"] == "c1"
    assert second["tools"] == first["tools"]


@pytest.mark.parametrize(("cached", "fine"), [(1944, True), (1943, False), (0, False)])
def test_more_than_one_page_too_much_is_a_failure(cached: int, fine: bool) -> None:
    problem, _ = play(Script(cached=cached))  # the tool message is 2050 - 1920 - 40 = 90 tokens
    assert (problem == "") == fine


def test_other_states_and_sessions_are_failures() -> None:
    assert "should be WAITING_TOOL" in play(Script(state="IDLE"))[0]
    assert "opened session s2" in play(Script(session="s2"))[0]


def test_a_refusal_is_told_in_the_servers_words() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/chat/completions":
            return httpx.Response(400, json={"error": {"message": "no tools here"}})
        return Script()(request)

    client = httpx.Client(base_url="http://server", transport=httpx.MockTransport(refuse))
    with pytest.raises(ChatError, match="no tools here"):
        run(client, Console(file=io.StringIO()), 0.0)


def test_bars_lie_where_the_states_were() -> None:
    found = rows(HISTORY, 110.0)
    assert [lasted for _, lasted, _ in found] == [0.5, 2.0, 0.5, 7.0, 0.0]
    for _, _, bar in found:
        assert len(bar) <= WIDTH
        assert bar.strip()
    assert found[3][2].count("█") == round(0.7 * WIDTH)
    assert found[1][2].index("█") == int(0.05 * WIDTH)


def test_a_row_fits_into_eighty_columns() -> None:
    out = io.StringIO()
    Console(file=out, width=80).print(timeline(HISTORY, 1110.0))
    assert "WAITING_TOOL" in out.getvalue()
    assert "…" not in out.getvalue()
    assert timeline([], 5.0).row_count == 0


def test_decisions_stand_between_the_states_where_they_were_made() -> None:
    begin = float(HISTORY[0]["at"])
    made = [
        {"at": begin - 5.0, "choice": "hold", "reason": "of an earlier time"},
        {"at": begin + 0.6, "choice": "hold", "reason": "soon"},
        {
            "at": begin + 9.9,
            "choice": "host",
            "reason": "a very long reason that needs more columns than are left",
        },
    ]
    out = io.StringIO()
    Console(file=out, width=80).print(timeline(HISTORY, begin + 10.0, made))
    lines = out.getvalue().splitlines()
    found = [number for number, line in enumerate(lines) if "▲" in line]
    assert len(found) == 2
    assert found[0] == 3  # after the title and two states
    assert lines[found[0]].split()[2:] == ["hold", "▲", "soon"]
    assert lines[found[1]].rstrip().endswith("▲")
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("place", [-1.0, 0.0, 0.3, 0.5, 0.99, 1.0, 7.0])
def test_a_mark_fits_wherever_it_is(place: float) -> None:
    for text in ("", "x", "y" * 100):
        assert "▲" in marked(place, text)
        assert len(marked(place, text)) <= WIDTH


def test_the_story_is_an_agents() -> None:
    assert 4000 < len(story.system_prompt()) < 9000
    assert [tool["function"]["name"] for tool in story.tools()] == ["look_up_order", "next_free_slot"]
    json.loads(story.RESULT)
