"""Numbers that no field can hold: one line that names the field, whichever route it came by."""

from __future__ import annotations

import pytest

from tests.api_rig import CHAT, Rig
from tests.waiting_sessions import path, waiting

HUGE = "9" * 400  # more than a double holds, and a decoder takes it
ENDLESS = "9" * 5000  # no decoder takes it
UNHEARD_OF = ("1e999", "-1e999", "NaN", "Infinity", ENDLESS, HUGE)


def refused(reply: object, param: str) -> None:
    status, error = reply.status_code, reply.json()["error"]  # type: ignore[attr-defined]
    assert (status, error["param"]) == (400, param), error
    assert error["message"].startswith(f"{param}: ")
    assert len(error["message"]) < 100
    assert error["message"].isprintable()


@pytest.mark.parametrize("number", UNHEARD_OF)
async def test_hints(number: str) -> None:
    s = await waiting()
    for field in ("expected_wait", "deadline", "priority", "retain", "final", "nonsense"):
        refused(await s.rig.post(path(s.id, "hints"), f'{{"a": "1e999", "{field}": {number}}}'), field)
    for part in ("start", "end", "priority"):
        said = f'{{"retain": [{{"start": 0, "priority": 1}}, {{"{part}": {number}}}]}}'
        refused(await s.rig.post(path(s.id, "hints"), said), f"retain[1].{part}")
    assert s.rig.engine.news == []
    assert (await s.rig.session(s.id))["hints"]["priority"] == 0


@pytest.mark.parametrize("number", UNHEARD_OF)
async def test_forks_and_results(number: str) -> None:
    s = await waiting()
    refused(await s.rig.post(path(s.id, "fork"), f'{{"at_turn": {number}}}'), "at_turn")
    result = f'"call_id": "{s.calls[0]}", "content": "x"'
    for field in ("epoch", "max_tokens"):
        refused(await s.rig.post(s.path, f'{{{result}, "{field}": {number}}}'), field)
    refused(await s.rig.post(s.path, f'{{"results": [{{{result}, "epoch": {number}}}]}}'), "results[0].epoch")
    assert not (await s.rig.session(s.id))["pending_tool_calls"][0]["result_taken"]


async def test_a_message_may_have_numbers_that_a_double_does_not_hold() -> None:
    body = '{"model": "tiny", "messages": [{"role": "user", "content": "a", "extra": {"n": %s}}]}'
    rig = Rig()
    assert (await rig.post(CHAT, body % HUGE)).status_code == 200
    refused(await rig.post(CHAT, body % "1e999"), "messages[0].extra.n")
