"""Webhook tools on a machine whose clock is set while they run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import nullcontext

import pytest

from tests.api_rig import settled
from tests.hooks_rig import ENDPOINTS, LATER, URL, HooksRig, result
from tests.unit.test_hooks_tools import nothing_owed
from tools_bridge.webhooks.replies import Answered
from tools_bridge.webhooks.signing import BadSignature, verify


@pytest.fixture
async def desk() -> AsyncIterator[HooksRig]:
    made = HooksRig()
    yield made
    await made.close()


@pytest.mark.parametrize("jump", [-7200.0, 7200.0])
async def test_a_clock_that_is_set_expires_and_extends_nothing(desk: HooksRig, jump: float) -> None:
    """The machine's, by hours; signatures are of the time that it has then."""
    desk.sender.answer(URL, LATER)
    endpoint = await desk.endpoint(payload="full")
    agent = await desk.agent(endpoint, timeout=60)
    (event,) = await desk.sent()
    told = event["data"]["required_action"]
    await desk.clock.pass_by(50)
    desk.clock.skew = jump
    desk.sender.posts.clear()
    await desk.clock.pass_by(5)
    desk.sender.answer(URL, Answered(500), result("sun"))
    other = await desk.agent(endpoint, timeout=30)
    (first,) = await desk.sent()
    assert first["data"]["required_action"]["expires_at"] == int(desk.clock.unix()) + 30
    assert first["created_at"] == int(desk.clock.unix())
    assert await desk.callback(told["callback_url"], {"output": "rain"}) == (202, None)
    assert await desk.outcome(agent) == "rain"
    await desk.clock.pass_by(2)
    assert await desk.outcome(other) == "sun"
    desk.sender.posts.clear()
    desk.sender.answer(URL, LATER)
    third = await desk.agent(endpoint, timeout=20)
    url = (await desk.sent())[-1]["data"]["required_action"]["callback_url"]
    desk.clock.skew = -jump
    await desk.clock.pass_by(19)
    assert (await third.get())["status"] == "requires_action"
    await desk.clock.pass_by(2)
    assert await desk.outcome(third) == "The tool did not answer within 20 s."
    assert await desk.callback(url, {"output": "rain"}) == (410, "call_over")
    entries = (await desk.rig.client.get(f"{ENDPOINTS}/{endpoint}/deliveries")).json()["data"]
    assert {entry["created_at"] > desk.clock.unix() - 200 for entry in entries} == {True}
    await settled(lambda: nothing_owed(desk))


@pytest.mark.parametrize("jump", [-90_000.0, 90_000.0])
async def test_an_old_secret_signs_for_a_day_whatever_the_clock_says(desk: HooksRig, jump: float) -> None:
    endpoint = await desk.endpoint()
    old = desk.secrets[endpoint]
    asked = {"keep_old_secret_active_for_24_hours": True}
    new = (await desk.rig.post(f"{ENDPOINTS}/{endpoint}/rotate_secret", asked)).json()["signing_secret"]
    desk.clock.skew = jump
    for passes, good in ((80_000.0, [old, new]), (7000.0, [new])):
        await desk.clock.pass_by(passes)
        desk.sender.posts.clear()
        desk.sender.answer(URL, result("rain"))
        await desk.outcome(await desk.agent(endpoint))
        (post,) = desk.sender.posts
        for secret in (old, new):
            with nullcontext() if secret in good else pytest.raises(BadSignature):
                verify([secret], post.headers, post.body, desk.clock.unix())
