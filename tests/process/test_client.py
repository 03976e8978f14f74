"""The client, with and without asyncio, on the real application behind a real socket."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from agentserve.client import (
    AsyncClient,
    AsyncSession,
    Client,
    Conflict,
    NotFound,
    Resynced,
    Retry,
    TextDelta,
    ToolCalled,
    ToolReturned,
    TurnFailed,
    TurnResult,
    TurnStarted,
    tool,
)
from agentserve.client.protocol.toolbox import GRACE
from tests.api_rig import Rig, served, settled
from tests.client_rig import calling, held, obey
from tests.cutting_proxy import cutting
from tests.fakes import Script, ScriptedEngine, say

RETRY = Retry(first=0.01, longest=0.05, patience=20.0)
BOTH = pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])


@pytest.fixture
async def rig() -> Rig:
    return Rig(ScriptedEngine(obey))


@pytest.fixture
async def url(rig: Rig) -> AsyncIterator[str]:
    async with served(rig.app) as base:
        yield base


async def asked(url: str, is_async: bool, text: str, tools: list[Any]) -> tuple[list[Any], TurnResult, Any]:
    """Events and result of one turn, and the results that were refused."""
    if is_async:
        async with (
            AsyncClient(url, retry=RETRY) as client,
            await _made(client, tools) as session,
            session.run(text) as turn,
        ):
            events = [event async for event in turn]
            return events, await turn.result(), turn.refused

    def work() -> tuple[list[Any], TurnResult, Any]:
        with (
            Client(url, retry=RETRY) as client,
            client.sessions.create("tiny", tools=tools) as session,
            session.run(text) as turn,
        ):
            events = list(turn)
            return events, turn.result(), turn.refused

    return await asyncio.to_thread(work)


async def _made(client: AsyncClient, tools: Any = ()) -> AsyncSession:
    return await client.sessions.create("tiny", tools=tools)


def returned(events: list[Any]) -> list[tuple[Any, Any]]:
    return [(event.output, event.error) for event in events if isinstance(event, ToolReturned)]


def rendezvous() -> tuple[Any, Any]:
    """Two tools of which each waits for the other."""
    here = {"one": threading.Event(), "two": threading.Event()}

    def meet(mine: str, other: str) -> str:
        here[mine].set()
        assert here[other].wait(20)
        return mine

    @tool
    def one() -> str:
        return meet("one", "two")

    @tool
    async def two() -> str:
        return await asyncio.to_thread(meet, "two", "one")

    return one, two


@BOTH
async def test_tools_run_side_by_side_and_results_come_in_any_order(
    rig: Rig, url: str, is_async: bool
) -> None:
    first = threading.Event()

    @tool
    def last(n: int) -> dict[str, int]:
        assert first.wait(20)
        return {"n": n}

    one, two = rendezvous()
    text = calling(last={"n": 3}, one={}, two={})

    async def let_go() -> None:
        await settled(lambda: [h for h in rig.context.agents.shelf if len(h.outputs()) == 2])
        first.set()

    watching = asyncio.create_task(let_go())
    events, result, refused = await asked(url, is_async, text, [last, one, two])
    await watching
    assert result.raise_for_status().text == 'Results: {"n":3}, one, two'
    outputs = [output for output, _ in returned(events)]
    assert outputs[-1] == '{"n":3}'
    assert set(outputs[:2]) == {"one", "two"}
    assert refused == []


@BOTH
async def test_tools_that_fail_hang_or_are_called_wrongly(rig: Rig, url: str, is_async: bool) -> None:
    hanging = threading.Event()

    @tool(timeout=0.05)
    def hangs() -> str:
        hanging.wait(30)
        return "late"

    @tool(timeout=0.05)
    async def sleeps() -> str:
        await asyncio.sleep(30)
        return "late"

    @tool
    def fails(n: int) -> str:
        raise LookupError(f"no {n}")

    @tool
    async def times_out() -> str:
        raise TimeoutError("its own")

    @tool
    async def cancels_itself() -> str:
        raise asyncio.CancelledError

    @tool
    def odd() -> object:
        return object()

    text = calling(
        hangs={},
        sleeps={},
        fails={"n": 1},
        fails__2={"n": "x"},
        times_out={},
        odd={},
        cancels_itself={},
        stranger={},
    )
    tools = [hangs, sleeps, fails, times_out, odd, cancels_itself]
    events, result, _ = await asked(url, is_async, text, tools)
    hanging.set()
    assert result.status == "completed"
    errors = [str(error) for _, error in returned(events)]
    for told in (
        "longer than 0.05 s",
        "LookupError: no 1",
        "Bad arguments",
        "TimeoutError: its own",
        "The tool failed: TypeError",
        "The tool failed: CancelledError",
        "There is no tool 'stranger'",
    ):
        assert any(told in error for error in errors), (told, errors)
    assert len(errors) == 8
    assert "late" not in result.text


@BOTH
async def test_a_result_goes_out_while_it_is_produced(rig: Rig, url: str, is_async: bool) -> None:
    """The server has the first piece before the tool makes the second."""
    growing: list[str] = []
    context, seen = rig.context, threading.Event()
    news = rig.engine.tell

    def tell(command: Any) -> None:
        growing.append(type(command).__name__)
        seen.set()
        news(command)

    rig.engine.tell = tell  # type: ignore[method-assign]

    @tool
    def lines(n: int) -> Iterator[str]:
        """Lines."""
        for i in range(n):
            yield f"{i},"
            assert seen.wait(20)

    @tool
    async def more() -> AsyncIterator[str]:
        yield "é"
        yield "!"

    @tool(timeout=0.2)
    async def stuck() -> AsyncIterator[str]:
        yield "half"
        await asyncio.sleep(30)

    @tool
    def breaks() -> Iterator[str]:
        yield "half"
        raise RuntimeError("in the middle")

    text = calling(lines={"n": 3}, more={}, stuck={}, breaks={})
    events, result, refused = await asked(url, is_async, text, [lines, more, stuck, breaks])
    assert {"0,1,2,", "é!"} <= {output for output, _ in returned(events)}
    errors = " ".join(str(error) for _, error in returned(events) if error)
    assert "longer than 0.2 s" in errors
    assert "in the middle" in errors
    assert "half" not in result.text
    assert growing
    assert refused == []
    assert len(context.agents) == 0


@BOTH
async def test_a_stream_that_is_cut_again_and_again(rig: Rig, url: str, is_async: bool) -> None:
    """On a real socket, by reset: what is told is what is told without."""
    one, two = rendezvous()

    def text_of(events: list[Any]) -> str:
        return "".join(event.text for event in events if isinstance(event, TextDelta))

    request = calling(one={}, two={})
    whole, result, _ = await asked(url, is_async, request, [one, two])
    for cuts in ([0, 0, 700], [900, 300, 800, 650], [3000, 0, 1200], [1] * 5, [5000, 9000]):
        many, least = len(cuts), min(cuts)
        async with cutting(url, cuts) as (through, proxy):
            events, again, refused = await asked(through, is_async, request, list(rendezvous()))
        assert proxy.cuts == []
        assert proxy.streams == many + 1
        if least > 200:  # every reply had its head: from then on it is known where to take up
            assert None not in proxy.places[1:]
        assert [type(event) for event in events] == [type(event) for event in whole]
        assert not any(isinstance(event, Resynced) for event in events)
        assert text_of(events) == text_of(whole)
        assert again.text == result.text
        assert refused == []
    assert len(rig.context.agents) == 0


@BOTH
async def test_events_that_the_server_forgot_meanwhile(rig: Rig, url: str, is_async: bool) -> None:
    @tool
    def forget() -> str:
        (history,) = rig.context.agents.shelf
        rig.context.telling.log_of(history).bound(1)
        return "forgotten"

    async with cutting(url, [4000, 200]) as (through, _):
        events, result, _ = await asked(through, is_async, calling(forget={}), [forget])
    assert result.text == "Results: forgotten"
    assert "".join(e.text for e in events if isinstance(e, TextDelta)).endswith("Results: forgotten")


async def test_a_cancelled_read_loses_nothing(rig: Rig, url: str) -> None:
    scripts: list[Script] = []
    rig.engine.reply = held(5, scripts)
    async with AsyncClient(url, retry=RETRY) as client:
        session = await _made(client)
        turn = session.run("say Hello from here.")
        told: list[Any] = []
        while True:
            try:
                async with asyncio.timeout(0.05 if scripts else 20):
                    told.append(await anext(turn))
            except TimeoutError:
                if scripts[0].release.is_set():
                    continue
                scripts[0].release.set()
            except StopAsyncIteration:
                break
        assert "".join(event.text for event in told if isinstance(event, TextDelta)) == "Hello from here."
        assert (await turn.result()).text == "Hello from here."
        assert isinstance(told[0], TurnStarted)


async def test_a_cancelled_turn_lets_go_of_everything_and_is_resumed(rig: Rig, url: str) -> None:
    running = asyncio.Event()
    ended: list[str] = []

    @tool
    async def waits(n: int) -> str:
        running.set()
        try:
            if not ended:
                await asyncio.sleep(60)
            return f"{n}"
        finally:
            ended.append("ended")

    async with AsyncClient(url, retry=RETRY) as client:
        session = await _made(client, [waits])
        before = asyncio.all_tasks()
        task = asyncio.create_task(session.run(calling(waits={"n": 7})).result())
        await running.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended == ["ended"]
        log = rig.context.telling.log_of(next(iter(rig.context.agents.shelf)))
        await settled(lambda: not [t for t in asyncio.all_tasks() - before if "tool" in t.get_name()])
        assert (await session.refresh()).status == "requires_action"  # the server's turn goes on
        assert log.last
        (call,) = session.info.required
        assert (call.name, call.arguments) == ("waits", {"n": 7})

        other = await client.sessions.get(session.id, tools=[waits])
        result = await other.resume().result()
        assert result.text == "Results: 7"
        assert (await session.resume().result()) == result  # it is over; all of it is told again


@BOTH
async def test_cancel_in_the_middle_and_the_next_turn(rig: Rig, url: str, is_async: bool) -> None:
    started = threading.Event()

    @tool
    async def waits() -> str:
        started.set()
        await asyncio.sleep(60)
        return "never"

    if is_async:
        async with AsyncClient(url, retry=RETRY) as client, await _made(client, [waits]) as session:
            async with session.run(calling(waits={})) as turn:
                async for event in turn:
                    if started.is_set() or type(event).__name__ == "ToolCalled":
                        await turn.cancel()
            assert (await turn.result()).status == "cancelled"
            assert (await session.run("Hi").result()).text == "Hello."
            assert [t["status"] for t in await session.turns()] == ["cancelled", "completed"]
    else:

        def work() -> None:
            with Client(url, retry=RETRY) as client, client.sessions.create("tiny", tools=[waits]) as session:
                with session.run(calling(waits={})) as turn:
                    for event in turn:
                        if type(event).__name__ == "ToolCalled":
                            turn.cancel()
                result = turn.result()
                assert result.status == "cancelled"
                with pytest.raises(TurnFailed, match="cancelled"):
                    result.raise_for_status()
                assert session.run("Hi").result().text == "Hello."
                assert [t["status"] for t in session.turns()] == ["cancelled", "completed"]

        began = time.monotonic()
        await asyncio.to_thread(work)
        assert time.monotonic() - began < 30  # nobody waits for the tool


async def test_sessions_hints_forks_and_lists(rig: Rig, url: str) -> None:
    @tool(timeout=7)
    async def weather(city: str = "Oslo") -> str:
        """The weather of a city."""
        return "rain"

    rig.engine.reply = obey
    async with AsyncClient(url, retry=RETRY) as client:
        async with await client.sessions.create(
            "tiny", instructions="Be brief.", tools=[weather], metadata={"of": "us"}, temperature=0
        ) as session:
            agent = session.info.raw["agent"]
            assert (agent["instructions"], agent["temperature"]) == ("Be brief.", 0)
            assert agent["tools"][0]["parameters"]["properties"]["city"]["default"] == "Oslo"
            assert agent["tools"][0]["description"] == "The weather of a city."
            assert agent["tools"][0]["timeout"] == 7 + GRACE
            assert (await session.hint(priority=-1))["priority"].status == "deferred"
            await session.run("Hi").result()
            assert (await session.describe())["hints"]["priority"] == -1
            receipts = await session.hint(priority=1, expected_wait=-3, nonsense=1)
            assert receipts["priority"].status == "accepted"
            assert receipts["expected_wait"].status == "rejected"
            assert receipts["expected_wait"].reason
            assert (await session.describe())["hints"]["priority"] == 1
            assert (await session.hint(priority=None))["priority"].status == "accepted"
            async with await session.fork() as branch:
                assert branch.id != session.id
                assert (await branch.hint(final=True))["final"].status in ("accepted", "deferred")
                assert (await branch.describe())["state"] == "IDLE"
                async with await branch.fork():
                    pass
            with pytest.raises(NotFound):
                await branch.describe()
            items = await session.items()
            assert [item["role"] for item in items] == ["user", "assistant"]
            others = [await _made(client) for _ in range(3)]
            listed = [info.id async for info in client.sessions.list()]
            assert listed == [each.id for each in [*reversed(others), session]]
            assert [info.id async for info in client.sessions.list(metadata={"of": "us"})] == [session.id]
        with pytest.raises(NotFound) as caught:
            await session.refresh()
        assert caught.value.code == "session_not_found"


async def test_a_forked_wait_is_answered_on_its_own(rig: Rig, url: str) -> None:
    gate = asyncio.Event()

    @tool
    async def weather() -> str:
        await gate.wait()
        return "rain"

    async with AsyncClient(url, retry=RETRY) as client:
        session = await _made(client, [weather])
        async with session.run(calling(weather={})) as turn:
            async for event in turn:
                if type(event).__name__ == "ToolCalled":
                    branch = await session.fork()
                    reply = await branch.give({event.call.id: "snow"})
                    assert reply["choices"][0]["message"]["content"] == "Results: snow"
                    gate.set()
        assert (await turn.result()).text == "Results: rain"


async def test_one_turn_at_a_time_and_two_clients(rig: Rig, url: str) -> None:
    scripts: list[Script] = []
    rig.engine.reply = held(2, scripts)
    async with AsyncClient(url, retry=RETRY) as client:
        session = await _made(client)
        first = asyncio.create_task(session.run("say Hello").result())
        await settled(lambda: scripts)
        with pytest.raises(Conflict) as caught:
            await session.run("say no").result()
        assert caught.value.code == "turn_running"
        reader = asyncio.create_task((await client.sessions.get(session.id)).resume().result())
        await asyncio.sleep(0.02)
        scripts[0].release.set()
        assert (await first).text == (await reader).text == "Hello"


@BOTH
async def test_who_looks_on_answers_no_calls(rig: Rig, url: str, is_async: bool) -> None:
    """A client without the tool leaves the call to the one that has it."""
    seen = threading.Event()

    @tool
    def weather() -> str:
        assert seen.wait(20)
        return "rain"

    def look_on(id_: str) -> str:
        with Client(url, retry=RETRY) as client:
            turn = client.sessions.get(id_).resume()
            for event in turn:
                if isinstance(event, ToolCalled):
                    time.sleep(0.05)
                    seen.set()
            return turn.result().text

    async def look_on_too(id_: str) -> str:
        async with AsyncClient(url, retry=RETRY) as client:
            turn = (await client.sessions.get(id_)).resume()
            async for event in turn:
                if isinstance(event, ToolCalled):
                    await asyncio.sleep(0.05)
                    seen.set()
            return (await turn.result()).text

    async with AsyncClient(url, retry=RETRY) as client, await _made(client, [weather]) as session:
        first = asyncio.create_task(session.run(calling(weather={})).result())
        await settled(lambda: [h for h in rig.context.agents.shelf if h.turns])
        other = look_on_too(session.id) if is_async else asyncio.to_thread(look_on, session.id)
        assert await other == (await first).text == "Results: rain"


async def test_the_end_of_a_session_that_is_gone(url: str) -> None:
    async with AsyncClient(url, retry=RETRY) as client:
        async with await _made(client) as session:
            await session.close()
            with pytest.raises(NotFound):
                await session.close()

        async def fail() -> None:
            async with await _made(client) as session:
                await session.close()
                raise RuntimeError("mine")

        with pytest.raises(RuntimeError, match="mine"):
            await fail()


async def test_what_was_opened_is_closed_with_its_client(rig: Rig, url: str) -> None:
    scripts: list[Script] = []
    rig.engine.reply = held(2, scripts)
    async with AsyncClient(url, retry=RETRY) as client:
        turn = (await _made(client)).run("say Hello")
        await anext(turn)
    with pytest.raises(StopAsyncIteration):
        await anext(turn)
    scripts[0].release.set()

    def work() -> None:
        with Client(url, retry=RETRY) as client:
            turn = client.sessions.create("tiny").run("say Hello")
            next(turn)
        assert next(turn, None) is None

    rig.engine.reply = say("Hello")
    await asyncio.to_thread(work)


@pytest.mark.parametrize("way", ["deleted", "answered elsewhere"])
async def test_while_a_tool_runs(rig: Rig, url: str, way: str) -> None:
    """Somebody else ends what it waits for: an error that says so, or a result that is not ours."""
    async with AsyncClient(url, retry=RETRY) as client, AsyncClient(url, retry=RETRY) as other:

        @tool
        async def weather() -> str:
            if way == "deleted":
                await (await other.sessions.get(session.id)).close()
            else:
                theirs = await other.sessions.get(session.id, tools=[snow])
                await theirs.resume().result()
            return "rain"

        def made(name: str, function: Callable[[], str]) -> Any:
            return tool(name=name)(function)

        snow = made("weather", lambda: "snow")
        session = await _made(client, [weather])
        turn = session.run(calling(weather={}))
        result = await turn.result()
        if way == "deleted":
            assert result.status == "cancelled"
            with pytest.raises(NotFound):
                await session.run("Hi").result()
        else:
            assert result.text == "Results: snow"
