"""Whose session a request is: every field and header that clients name theirs by, in one order."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.datastructures import Headers

from agentserve.messages import Devalue
from agentserve.server.errors import ApiError
from agentserve.server.http.names import Identity, identity
from agentserve.server.limits import Limits
from tests.api_rig import Rig, user
from tests.fakes import ScriptedEngine, say
from tiering.policy.base import Departure


def told(headers: dict[str, str], body: str | None = None, extra: object = None) -> Identity:
    return identity(Headers(headers), body, Limits(), extra)


@pytest.mark.parametrize(
    ("headers", "named", "parent"),
    [
        ({}, None, None),
        ({"x-session-id": "a"}, "a", None),
        ({"x-session-id": "a", "x-parent-session-id": "p"}, "a", "p"),
        ({"x-claude-code-session-id": "s"}, "s", None),
        ({"x-claude-code-session-id": "s", "x-claude-code-agent-id": "g"}, "g", "s"),
        (
            {
                "x-claude-code-session-id": "s",
                "x-claude-code-agent-id": "g",
                "x-claude-code-parent-agent-id": "q",
            },
            "g",
            "q",
        ),
        ({"thread-id": "t", "x-codex-parent-thread-id": "p"}, "t", "p"),
        ({"session-id": "t"}, "t", None),
        ({"thread-id": "t", "session-id": "older"}, "t", None),
        ({"x-dynamo-session-id": "d", "x-dynamo-parent-session-id": "p"}, "d", "p"),
        ({"x-deepseek-harness-session-id": "h", "x-deepseek-harness-parent-session-id": "p"}, "h", "p"),
        ({"x-session-id": "a", "thread-id": "t", "x-codex-parent-thread-id": "p"}, "a", None),
        ({"thread-id": "t", "x-codex-parent-thread-id": "t"}, "t", None),
        ({"x-session-id": "a", "x-codex-parent-thread-id": "p"}, "a", "p"),  # it speaks of no other
        ({"x-session-id": "a", "session-id": "t", "x-codex-parent-thread-id": "p"}, "a", None),
        ({"x-session-id": "a", "x-claude-code-session-id": "s"}, "a", None),  # no parent: another name
        ({"x-parent-session-id": "p"}, None, None),  # of no session that has a name
        ({"x-claude-code-agent-id": "g", "x-dynamo-parent-session-id": "p"}, "g", "p"),
        ({"thread-id": "no name of ours", "x-dynamo-session-id": "d"}, "d", None),
        ({"thread-id": "t", "x-codex-parent-thread-id": "x" * 1000}, "t", None),
    ],
)
def test_headers_in_their_order(headers: dict[str, str], named: str | None, parent: str | None) -> None:
    assert told(headers) == Identity(named, parent)


def test_the_body_comes_before_headers_and_xargs_after_ours() -> None:
    headers = {"x-session-id": "a", "thread-id": "t"}
    assert told(headers, "body").named == "body"
    assert told(headers, None, {"session_id": "x"}).named == "a"
    assert told({"thread-id": "t"}, None, {"session_id": "x"}).named == "x"
    assert told({"thread-id": "t"}, None, {"session_id": ["x"]}).named == "t"
    assert told({"thread-id": "t", "x-codex-parent-thread-id": "p"}, "t") == Identity("t", "p")
    assert told({"thread-id": "t", "x-codex-parent-thread-id": "p"}, "u") == Identity("u")  # another's


@pytest.mark.parametrize("header", ["x-parent-session-id", "x-codex-parent-thread-id"])
def test_a_parent_is_that_of_the_session_the_body_names(header: str) -> None:
    assert told({header: "p"}, "u") == Identity("u", "p")
    assert told({header: "p"}, None, {"session_id": "u"}) == Identity("u", "p")
    assert told({header: "p", "x-session-id": "u"}, "u") == Identity("u", "p")
    assert told({header: "u"}, "u") == Identity("u")
    assert told({"x-parent-session-id": "p", "x-session-id": "a"}, "u") == Identity("u")


async def test_a_session_named_in_a_body_is_its_parent_s_family() -> None:
    rig = Rig(ScriptedEngine(say("Hello!")))
    await rig.chat([user("a")], session_id="lead")
    history = [user("a"), {"role": "assistant", "content": "Hello!"}, user("b")]
    child = await rig.chat(history, {"x-parent-session-id": "lead"}, session_id="sub")
    assert child["session_id"] == "sub"
    assert (await rig.session("sub"))["parent"] == "lead"
    assert rig.engine.forked[-1][2] > 0


@pytest.mark.parametrize("name", ["", "a b", "x" * 129, "a\u00e9"])
def test_a_bad_name_that_is_meant_for_us_is_refused(name: str) -> None:
    for headers, body in (({"x-session-id": name}, None), ({}, name)):
        with pytest.raises(ApiError) as bad:
            told(headers, body)
        assert bad.value.code == "invalid_session_id"


@pytest.mark.parametrize(
    ("headers", "final"),
    [
        ({"x-session-final": "true"}, True),
        ({"x-dynamo-session-final": "1"}, True),
        ({"x-session-final": "false"}, False),
        ({"x-session-final": "", "x-session-id": "a"}, False),
    ],
)
def test_the_last_turn_says_so(headers: dict[str, str], final: bool) -> None:
    assert told(headers).final is final


async def test_agents_of_one_thread_share_its_messages_and_disturb_nobody() -> None:
    rig = Rig(ScriptedEngine(say("Hello!")))
    lead = {"thread-id": "lead"}
    sub = {"thread-id": "sub", "x-codex-parent-thread-id": "lead"}
    history: list[dict[str, Any]] = [user("a")]
    first = await rig.chat(history, lead)
    assert first["session_id"] == "lead"
    history += [{"role": "assistant", "content": "Hello!"}]
    child = await rig.chat([*history, user("for the sub-agent")], sub)
    assert child["session_id"] == "sub"
    shown = await rig.session("sub")
    assert shown["parent"] == "lead"
    assert rig.engine.forked[-1][2] > 0  # begins on the lead's KV
    second = await rig.chat([*history, user("b")], lead)
    assert second["session_id"] == "lead"
    assert (await rig.session("lead"))["turns"] == 2
    again = await rig.chat(
        [*history, user("for the sub-agent"), {"role": "assistant", "content": "Hello!"}, user("c")], sub
    )
    assert again["session_id"] == "sub"
    assert (await rig.session("sub"))["turns"] == 2
    assert not [news for news in rig.engine.news if isinstance(news, Devalue)]
    rig.check_rest()


async def test_a_sub_agent_of_nobody_we_know_opens_a_session_of_its_own() -> None:
    rig = Rig()
    reply = await rig.chat([user("a")], {"x-session-id": "s", "x-parent-session-id": "gone"})
    assert reply["session_id"] == "s"
    assert (await rig.session("s"))["parent"] is None


async def test_a_sub_agent_with_messages_of_its_own_shares_nothing() -> None:
    rig = Rig()
    await rig.chat([user("a")], {"x-session-id": "p"})
    await rig.chat([user("other")], {"x-session-id": "s", "x-parent-session-id": "p"})
    assert rig.engine.forked[-1][2] == 0
    assert (await rig.session("s"))["messages"] == 2
    rig.check_rest()


async def test_the_last_turn_devalues_its_session_and_keeps_it_usable() -> None:
    rig = Rig(ScriptedEngine(say("Hello!")))
    await rig.chat([user("a")], {"x-session-id": "s"})
    history = [user("a"), {"role": "assistant", "content": "Hello!"}, user("b")]
    await rig.chat(history, {"x-session-id": "s", "x-dynamo-session-final": "true"})
    [news] = [news for news in rig.engine.news if isinstance(news, Devalue)]
    assert news.why is Departure.FINISHED
    assert (await rig.session("s"))["devalued"] == "finished"
    history += [{"role": "assistant", "content": "Hello!"}, user("one more")]
    assert (await rig.chat(history, {"x-session-id": "s"}))["session_id"] == "s"
    assert (await rig.session("s"))["devalued"] is None


async def test_dynamo_hints_are_heard() -> None:
    rig = Rig()
    hints = {"agent_hints": {"priority": 7, "osl": 100}}
    await rig.chat([user("a")], nvext=hints, session_id="s")
    assert (await rig.session("s"))["hints"]["priority"] == 2
    assert rig.engine.hints[-1].priority == 2
    for odd in (
        {"agent_hints": {"priority": "high"}},
        {"agent_hints": 3},
        5,
        {"agent_hints": {"priority": True}},
    ):
        await rig.chat([user(str(odd))], nvext=odd)
        assert rig.engine.hints[-1].priority == 0


async def test_sglang_can_close_what_it_named() -> None:
    rig = Rig()
    await rig.chat([user("a")], session_id="s")
    for closed in (True, False):
        reply = await rig.post("/close_session", {"session_id": "s"})
        assert reply.json() == {"session_id": "s", "closed": closed}
    assert len(rig.context.directory) == 0
