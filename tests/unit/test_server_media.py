"""Images: refused where a user shows them, told of where a tool returned them, in every dialect."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from agentserve.messages import Submit, unpack_tokens
from tests.api_rig import CHAT, TOOLS, Rig, user
from tests.fakes import ScriptedEngine, say
from tests.messages_rig import CALL as CALLED
from tests.messages_rig import MESSAGES, TOOL, ask
from tests.responses_rig import CALL, RESPONSES, WEATHER, Client, call_of, result
from tests.waiting_sessions import waiting

URL = "data:image/png;base64,iVBORw0KGgo="
CHAT_IMAGE = {"type": "image_url", "image_url": {"url": URL}}
INPUT_IMAGE = {"type": "input_image", "image_url": URL, "detail": "auto"}
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
INSTEAD = "[image: not readable by this model]"


def text_in(submit: Submit) -> str:
    return bytes(token for token in unpack_tokens(submit.tokens) if token < 256).decode()


def went_on(rig: Rig, before: int) -> None:
    """The session read the placeholder, not the image, and its last turns go on from each other."""
    prompts = [unpack_tokens(submit.tokens) for submit in rig.engine.submits]
    assert len({submit.session for submit in rig.engine.submits}) == 1
    assert text_in(rig.engine.submits[before]).count(INSTEAD) == 1
    assert "iVBOR" not in text_in(rig.engine.submits[-1])
    for earlier, later in pairwise(prompts):
        assert later[: len(earlier)] == earlier
    rig.check_rest()


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
async def test_a_tool_message_with_an_image(kind: str) -> None:
    rig = Rig(ScriptedEngine(say(CALL)))
    first = (await rig.chat([user("a")], tools=TOOLS))["choices"][0]["message"]
    rig.engine.reply = say("I see nothing.")
    content = [{"type": "text", "text": "A page"}, CHAT_IMAGE | {"type": kind}]
    history = [
        user("a"),
        first,
        {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": content},
    ]
    second = (await rig.chat(history, tools=TOOLS))["choices"][0]["message"]
    await rig.chat([*history, second, user("Go on.")], tools=TOOLS)
    if kind == "image_url":
        went_on(rig, 1)
    assert "not readable by this model]" in text_in(rig.engine.submits[1])


async def test_a_tool_result_with_an_image_in_messages() -> None:
    rig = Rig(ScriptedEngine(say(CALLED)))
    first = await ask(rig, tools=[TOOL])
    rig.engine.reply = say("I see nothing.")
    block = {"type": "tool_result", "tool_use_id": first["content"][0]["id"], "content": [BLOCK]}
    history = [
        user("hi"),
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [block]},
    ]
    second = await ask(rig, *history, tools=[TOOL])
    await ask(
        rig, *history, {"role": "assistant", "content": second["content"]}, user("Go on."), tools=[TOOL]
    )
    went_on(rig, 1)


async def test_a_function_call_output_with_an_image() -> None:
    rig = Rig()
    client = Client(rig)
    first = await client.create("hi", says=CALL, tools=[WEATHER])
    output = [{"type": "input_text", "text": "A page"}, INPUT_IMAGE]
    items = [result(call_of(first), output)]
    more = {"tools": [WEATHER]}
    second = await client.create(items, says="I see nothing.", previous_response_id=first["id"], **more)
    await client.create("Go on.", previous_response_id=second["id"], **more)
    went_on(rig, 1)
    [kept] = (await client.get(f"{RESPONSES}/{second['id']}/input_items"))["data"][:1]
    assert [part["text"] for part in kept["output"]] == ["A page", INSTEAD]


async def test_a_result_with_an_image_on_the_session_route() -> None:
    s = await waiting()
    await s.give(0, [CHAT_IMAGE])
    assert (await s.give(0, [CHAT_IMAGE])).json()["results"][0]["status"] == "repeated"
    assert (await s.give(1, "noon")).status_code == 200
    assert INSTEAD in s.last_prompt()
    s.rig.check_rest()


@pytest.mark.parametrize(
    ("path", "field", "image"),
    [(CHAT, "messages", CHAT_IMAGE), (MESSAGES, "messages", BLOCK), (RESPONSES, "input", INPUT_IMAGE)],
)
async def test_what_a_user_shows_is_refused(path: str, field: str, image: Any) -> None:
    rig = Rig()
    body = {"model": "tiny", "max_tokens": 9, field: [{"role": "user", "content": [image]}]}
    reply = await rig.post(path, body)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith(f"{field}[0].content[0].type")
    assert not rig.engine.submits
