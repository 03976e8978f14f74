"""Tool results in every order, repeated and contradicted, at once or one by one: one turn, call order."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from agentserve.types import FinishReason
from tests.api_rig import TOOLS, Rig, hermes, user
from tests.fakes import Script, ScriptedEngine, say
from tests.waiting_sessions import Waiting

CALLS = 4


async def asked(failures: int) -> Waiting:
    rig = Rig(ScriptedEngine(say("".join(hermes("now", "{}") for _ in range(CALLS)))))
    made = Waiting(rig, await rig.chat([user("?")], tools=TOOLS))
    left = failures

    def reply(command: object) -> Script:
        nonlocal left
        left -= 1
        return Script([], FinishReason.ERROR, "broke") if left >= 0 else say("Done.")

    rig.engine.reply = reply
    return made


Post = tuple[tuple[int, bool], ...]  # (which call, whether it is the right result), one request

POSTS = st.lists(
    st.lists(st.tuples(st.integers(0, CALLS - 1), st.booleans()), min_size=1, max_size=3), max_size=12
)


@settings(max_examples=40, deadline=None)
@given(POSTS, st.booleans(), st.integers(0, 2))
def test_whatever_is_sent_each_call_has_one_result(
    posts: list[list[tuple[int, bool]]], together: bool, failures: int
) -> None:
    asyncio.run(_run(posts, together, failures))


async def _run(posts: list[list[tuple[int, bool]]], together: bool, failures: int) -> None:
    s = await asked(failures)
    first: dict[int, str] = {}  # what each call was taken with

    async def post(items: list[tuple[int, bool]]) -> None:
        body = [{"call_id": s.calls[i], "content": f"<{i}{'r' if right else 'w'}>"} for i, right in items]
        reply = await s.post(body)
        assert reply.status_code in (200, 409, 500), reply.text
        if reply.status_code == 200 and not together:
            for (i, _), sent in zip(items, body, strict=True):
                assert first.setdefault(i, sent["content"]) == sent["content"]

    if together:
        await asyncio.gather(*(post(items) for items in posts))
    else:
        for items in posts:
            await post(items)
    for _ in range(failures + 1):  # the rest, and again where the turn failed
        for i in range(CALLS):
            for content in (f"<{i}r>", f"<{i}w>"):  # one of them is new, or what was taken; else a conflict
                await s.give(i, content)
    view = await s.rig.session(s.id)
    assert (view["state"], view["turns"], view["pending_tool_calls"]) == ("IDLE", 2, [])
    assert len(s.rig.engine.submits) <= 2 + failures
    prompt = s.last_prompt()
    places = [max(prompt.find(f"<{i}r>"), prompt.find(f"<{i}w>")) for i in range(CALLS)]
    assert places == sorted(places)
    assert places[0] >= 0
    for i in range(CALLS):
        assert prompt.count(f"<{i}r>") + prompt.count(f"<{i}w>") == 1
        if i in first:
            assert first[i] in prompt
    s.rig.check_rest()
