"""How much a turn may reason: by whom it is said, and what the worker is told."""

from __future__ import annotations

from typing import Any

import pytest

from agentserve.types import ReasoningCap
from tests.api_rig import CHAT, Rig, user
from tests.fakes import CONTROL, ByteTokenizer
from tests.messages_rig import ask, minimal, refusal
from tests.responses_rig import RESPONSES
from tests.unit.test_server_reasoning import Thinks
from tools_bridge.registry import reply_form

OPEN, CLOSE = 1000, 1001
HARMONY = reply_form("<|channel|><|message|>")


@pytest.fixture
def one_token_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ByteTokenizer, "control", CONTROL | {"<think>": OPEN, "</think>": CLOSE})


def told(rig: Rig) -> ReasoningCap | None:
    cap: ReasoningCap | None = rig.engine.submits[-1].sampling.reasoning
    return cap


@pytest.mark.usefixtures("one_token_each")
async def test_in_chat_completions() -> None:
    rig = Rig()
    await rig.chat([user("a")], thinking_token_budget=32)
    assert told(rig) == ReasoningCap(32, CLOSE, OPEN)
    await rig.chat([user("a")])
    assert told(rig) is None
    rig = Rig(template=Thinks())
    await rig.chat([user("a")], thinking_token_budget=0)
    assert told(rig) == ReasoningCap(0, CLOSE, OPEN, inside=True)
    await rig.chat(
        [user("a"), {"role": "assistant", "content": "<think>hm</think> so"}],
        thinking_token_budget=5,
        continue_final_message=True,
        add_generation_prompt=False,
    )
    assert told(rig) == ReasoningCap(5, CLOSE, OPEN)


@pytest.mark.usefixtures("one_token_each")
@pytest.mark.parametrize(
    ("thinking", "cap"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, ReasoningCap(1024, CLOSE, OPEN)),
        ({"type": "enabled"}, None),
        ({"type": "adaptive", "budget_tokens": 1024}, None),
        ({"type": "disabled", "budget_tokens": 1024}, None),
    ],
)
async def test_in_messages(thinking: Any, cap: ReasoningCap | None) -> None:
    rig = Rig()
    await ask(rig, thinking=thinking)
    assert told(rig) == cap


@pytest.mark.usefixtures("one_token_each")
async def test_in_responses() -> None:
    rig = Rig()
    reply = await rig.post(RESPONSES, {"model": "tiny", "input": "a", "thinking_token_budget": 32})
    assert reply.status_code == 200
    assert told(rig) == ReasoningCap(32, CLOSE, OPEN)
    reply = await rig.post(RESPONSES, {"model": "tiny", "input": "a", "thinking_token_budget": -1})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "thinking_token_budget")


async def test_a_model_without_a_token_that_ends_reasoning_is_not_held() -> None:
    rig = Rig()
    await ask(rig, thinking={"type": "enabled", "budget_tokens": 1024})
    assert told(rig) is None
    rig = Rig(reply_form=HARMONY)
    await rig.chat([user("a")], thinking_token_budget=9)
    assert told(rig) is None


async def test_budgets_that_are_none_are_refused() -> None:
    thinking = {"type": "enabled", "budget_tokens": -1}
    status, kind, message = await refusal(Rig(), minimal(thinking=thinking))
    assert (status, kind) == (400, "invalid_request_error")
    assert message.startswith("thinking.budget_tokens: must be at least 0")
    for value, code in ((-1, None), (1 << 70, None), ("x", "invalid_value")):
        reply = await Rig().post(CHAT, {"messages": [user("a")], "thinking_token_budget": value})
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, code)
