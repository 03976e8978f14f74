"""Events of sessions and responses: told at least once, by one id each, whenever the server was killed."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from agentserve.server.agents.shelf import Shelf
from agentserve.server.http.responses.create import publish_ends
from agentserve.server.http.responses.desk import Desk as Responses
from agentserve.server.webhooks.payloads import EVENT_TYPES
from tests.agents_machine import MemoryBook
from tests.agents_rig import TWO, Agent, created
from tests.api_rig import settled
from tests.fakes import say
from tests.hooks_rig import HooksRig
from tests.responses_rig import Client
from tests.webhook_rig import settle

SESSION = ("created", "in_progress", "idle")


class Life:
    """Servers on the same records of agents; what is owed to webhooks dies with each."""

    def __init__(self) -> None:
        self.book = MemoryBook()
        self.told: list[tuple[str, str]] = []  # type and id, of each that was received
        self.last: HooksRig | None = None

    async def server(self, *, deaf: bool = False) -> HooksRig:
        """`deaf`: it dies before the outbox has anything."""
        shelf = Shelf(book=self.book)
        assert shelf.restore(dict(self.book.records)) == 0
        made = HooksRig(agents=shelf, like=self.last, leaving=deaf)
        if self.last is None:
            await made.endpoint(types=EVENT_TYPES)
        self.last = made
        return made

    async def died(self, server: HooksRig) -> None:
        await settle()
        self.told += [(body["type"], body["id"]) for body in await server.sent(0)]
        records = dict(self.book.records)
        await server.close()
        self.book = MemoryBook(records)

    def owed(self) -> list[str]:
        return [name for name in self.book.records if name.startswith("e:")]


@pytest.mark.parametrize("deaths", [0, 1, 3])
async def test_a_sessions_events_reach_the_outbox_of_a_later_server(deaths: int) -> None:
    life = Life()
    for number in range(deaths or 1):
        server = await life.server(deaf=deaths > 0)
        if number == 0:
            agent = await created(server.rig, "Hello!", input="Hi")
            await agent.until("idle")
        assert len(life.owed()) == (deaths > 0)
        await life.died(server)
    server = await life.server()
    await settled(lambda: not life.owed())
    await life.died(server)
    assert sorted(kind for kind, _ in life.told) == sorted(f"agent.session.{kind}" for kind in SESSION)
    assert len({id_ for _, id_ in life.told}) == 3
    server = await life.server()  # it has nothing to say
    await life.died(server)
    assert len(life.told) == 3


async def test_what_had_not_happened_is_not_told() -> None:
    """The end of a turn was about to be written."""
    life = Life()
    server = await life.server(deaf=True)
    agent = await created(server.rig, "Hello!", input="Hi")
    await agent.until("idle")
    name = f"t:{agent.id}:1"
    life.book.records[name] = life.book.records[name].replace(b'"completed"', b'"in_progress"', 1)
    await life.died(server)
    server = await life.server()
    await settle()
    kinds = [body["type"] for body in await server.sent(2)]
    assert sorted(kinds) == ["agent.session.created", "agent.session.in_progress"]
    server.rig.context.agents.resume()
    await Agent(server.rig, {"id": agent.id}).until("idle")
    await server.sent(3)
    await life.died(server)
    assert sorted(kind for kind, _ in life.told) == sorted(f"agent.session.{kind}" for kind in SESSION)
    assert not life.owed()


async def test_nothing_is_owed_that_nobody_wants() -> None:
    book = MemoryBook()
    server = HooksRig(agents=Shelf(book=book))
    agent = await created(server.rig, "Hello!", input="Hi")
    await agent.until("idle")
    assert not [name for name in book.records if name.startswith("e:")]
    await server.close()


async def test_a_client_that_is_waited_for_is_told_of_by_one_id() -> None:
    server = HooksRig()
    await server.endpoint(types=EVENT_TYPES)
    agent = await created(server.rig, TWO, input="Weather?")
    first, second = (await agent.until("requires_action"))["required_actions"]
    await server.sent(3)
    await agent.give(first)
    for _ in range(2):  # as each server does that finds it waiting
        server.rig.context.telling.requires_action(agent.history)
        await settle()
    assert len(server.sender.posts) == 3
    server.rig.engine.reply = say(TWO)
    await agent.give(second)
    await settled(lambda: len(server.sender.posts) == 4)  # it is another one
    assert len(set(server.sender.ids())) == 4
    await server.close()


@pytest.mark.parametrize("running", [False, True])
async def test_the_end_of_a_background_response(running: bool) -> None:
    server = HooksRig()
    await server.endpoint(types=EVENT_TYPES)
    server.hooks.leaving = True
    server.rig.engine.reply = say("Hello!", hold_at=2 if running else None)
    made = await Client(server.rig).create("a", background=True)
    shelf = server.rig.context.responses.shelf
    await settled(lambda: running or shelf.get(made["id"]).untold)
    kept: Any = list(shelf)
    await server.close()

    class Records:
        """As a disk gives them back."""

        responses, conversations, parts, skipped = kept, [], {}, 0
        spent: ClassVar[list[Any]] = []
        content_of: Any = None

        def put(self, name: str, content: bytes) -> Any:
            return None

        drop = put

    later = HooksRig(like=server, responses=Responses(lambda: 1e9, records=Records()))  # type: ignore[arg-type]
    for _ in range(2):
        publish_ends(later.rig.context)
        (body,) = await later.sent()
        assert body["type"] == ("response.failed" if running else "response.completed")
        assert body["data"] == {"id": made["id"]}
        await settled(lambda: not later.rig.context.responses.shelf.get(made["id"]).untold)
    assert len(later.sender.posts) == 1
    await later.close()
