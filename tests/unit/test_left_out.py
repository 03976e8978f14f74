"""However much of a request is left out, the log has one bounded line of it, in every dialect."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from agentserve.server.http.left_out import MOST_LISTED, listed
from tests.agents_rig import SESSIONS, body
from tests.api_rig import CHAT, Rig, user
from tests.fakes import ScriptedEngine, say
from tests.messages_rig import MESSAGES, minimal
from tests.responses_rig import RESPONSES

KINDS = [f"x{number}\n{'A' * 300}" for number in range(200)]
TOOLS = [{"type": kind, "name": "t"} for kind in KINDS]
ITEMS = [{"type": kind} for kind in KINDS]
BLOCKS = [{"type": f"{kind[:20].split()[0]}_tool_result"} for kind in KINDS]


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (CHAT, {"messages": [user("hi")], "tools": TOOLS}),
        (RESPONSES, {"model": "tiny", "input": [*ITEMS, user("hi")]}),
        (RESPONSES, {"model": "tiny", "input": "hi", "tools": TOOLS}),
        (MESSAGES, minimal(tools=TOOLS)),
        (MESSAGES, minimal(messages=[user("hi"), {"role": "user", "content": BLOCKS}, user("ho")])),
        (SESSIONS, body({"tools": TOOLS})),
    ],
)
async def test_one_line(path: str, asked: Any, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(ScriptedEngine(say("ok")))
    with caplog.at_level(logging.INFO):
        reply = await rig.post(path, asked)
    assert reply.status_code == 200, reply.text
    told = [record.getMessage() for record in caplog.records if record.name.startswith("agentserve")]
    assert len(told) == 1, told
    assert "'x0" in told[0]
    assert told[0].endswith(f", and {len(KINDS) - MOST_LISTED} more")
    assert "\n" not in told[0]
    assert len(told[0]) < 1000


def test_what_there_were_several_of_is_counted() -> None:
    assert listed(["mcp", "custom", "mcp"]) == "'mcp' (2), 'custom' (1)"
