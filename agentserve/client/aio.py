"""The client for asyncio."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import httpx

from agentserve.client.aio_http import AsyncHttp
from agentserve.client.aio_tools import AsyncTools
from agentserve.client.aio_turn import AsyncTurn
from agentserve.client.protocol import calls
from agentserve.client.protocol.errors import ClientError, NotFound, StatusError
from agentserve.client.protocol.events import Call, Receipt, SessionInfo
from agentserve.client.protocol.flow import Flow, JsonObject, Means, Retry
from agentserve.client.protocol.follow import TurnFlow, resume_turn, run_turn
from agentserve.client.protocol.toolbox import Toolbox
from agentserve.client.wire import ANSWER, SILENCE, URL, Settings
from agentserve.tools import Tool


class AsyncBranch:
    """A session on the session routes, such as a fork is: it is carried on by `give`, or by chat requests
    that name it. As a context manager it is closed in the end."""

    def __init__(self, http: AsyncHttp, id_: str) -> None:
        self._http = http
        self.id = id_

    async def describe(self) -> JsonObject:
        """Its state, where its KV is, its pending calls, what was decided about it. NotFound before its first
        turn."""
        return await self._http.run(calls.describe(self.id, self._http.means))

    async def hint(self, **hints: Any) -> dict[str, Receipt]:
        """`expected_wait` and `deadline` (seconds), `priority`, `final`, `retain`; None takes one back. A
        receipt for each."""
        return await self._http.run(calls.hint(self.id, hints, self._http.means))

    async def fork(self, at_turn: int | None = None) -> AsyncBranch:
        """A session with this one's history, up to a turn, and its KV."""
        made = await self._http.run(calls.fork(self.id, at_turn, self._http.means))
        return AsyncBranch(self._http, made["id"])

    async def give(self, results: Mapping[str, str]) -> JsonObject:
        """Results of calls by their ids: a receipt, or with the last one a chat completion."""
        return await self._http.run(calls.give_own(self.id, results, self._http.means))

    async def close(self) -> None:
        """NotFound."""
        await self._http.run(self._closed(self._http.means))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """One that is gone already is no error. After an exception it is tried once, and is none either."""
        with suppress(NotFound if error is None else ClientError):
            await self._http.run(self._closed(self._http.means if error is None else self._http.means.once()))

    def _closed(self, means: Means) -> Flow[None]:
        return calls.close_own(self.id, means)


class AsyncSession(AsyncBranch):
    """An agent's session, with the tools that are run here. As a context manager it is closed, which deletes
    it, in the end."""

    def __init__(
        self, http: AsyncHttp, info: SessionInfo, box: Toolbox, opened: set[AsyncTurn | AsyncTools]
    ) -> None:
        super().__init__(http, info.id)
        self.info = info  # as it was when it was created or got
        self._box = box
        self._background = AsyncTools(http, info.id, box, streams=False)
        self._opened = opened

    @property
    def refused(self) -> list[tuple[Call, StatusError]]:
        """Results of background tools that the server did not take."""
        return self._background.refused

    def run(self, text: str | Sequence[str]) -> AsyncTurn:
        """Say something. The turn begins when its first event is asked for."""
        return self._turn(run_turn(self.id, text, self._http.means, self._box.background))

    def resume(self) -> AsyncTurn:
        """The last turn, from its beginning, in whatever state it is: of a client that went away, or gave up
        for a while. Calls that wait for results are run (again, if they were run before)."""
        return self._turn(resume_turn(self.id, self._http.means, self._box.background))

    def _turn(self, flow: TurnFlow) -> AsyncTurn:
        return AsyncTurn(
            self._http, self.id, self._box, flow, background=self._background, opened=self._opened
        )

    async def wait_for_background(self) -> None:
        """Until the tools that run in the background have brought their results, which the model reads with
        its next call. Raises what kept one from being brought."""
        await self._background.wait()

    async def cancel(self) -> None:
        """End the turn that runs. The session takes the next message."""
        await self._http.run(calls.cancel(self.id, self._http.means))

    async def decide(self, request: str, *, approve: bool) -> None:
        """What a user says to an `ApprovalAsked`. Conflict where another word was said before."""
        await self._http.run(calls.decide(self.id, request, approve, self._http.means))

    async def refresh(self) -> SessionInfo:
        self.info = await self._http.run(calls.get_session(self.id, self._http.means))
        return self.info

    async def items(self) -> list[JsonObject]:
        return await self._http.run(calls.all_of(calls.path_of(self.id, "items"), self._http.means))

    async def turns(self) -> list[JsonObject]:
        return await self._http.run(calls.all_of(calls.path_of(self.id, "turns"), self._http.means))

    async def close(self) -> None:
        """A turn that runs is cancelled, and the session is gone. NotFound."""
        await self._background.close()
        await super().close()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._background.close()
        await super().__aexit__(kind, error, trace)

    def _closed(self, means: Means) -> Flow[None]:
        return calls.delete_session(self.id, means)


class AsyncSessions:
    def __init__(self, http: AsyncHttp, opened: set[AsyncTurn | AsyncTools]) -> None:
        self._http = http
        self._opened = opened

    async def create(
        self,
        model: str,
        *,
        instructions: str | None = None,
        tools: Iterable[Tool | JsonObject] = (),
        metadata: Mapping[str, str] | None = None,
        **agent: Any,
    ) -> AsyncSession:
        """`tools`: functions made tools by `@tool`, which are run here, or descriptions of others. `agent`:
        more of its fields (`temperature`, `max_output_tokens`, `tool_choice`, …)."""
        box = Toolbox(tools)
        body = {"model": model, "instructions": instructions, "tools": box.described(), **agent}
        info = await self._http.run(calls.create_session(body, metadata, self._http.means))
        return AsyncSession(self._http, info, box.of(info), self._opened)

    async def get(self, id_: str, *, tools: Iterable[Tool | JsonObject] = ()) -> AsyncSession:
        """A session that there is. `tools`: those of it that are run here. NotFound."""
        box = Toolbox(tools)
        info = await self._http.run(calls.get_session(id_, self._http.means))
        return AsyncSession(self._http, info, box.of(info), self._opened)

    async def list(self, *, metadata: Mapping[str, str] | None = None) -> AsyncIterator[SessionInfo]:
        """All, the newest first; those with these metadata."""
        after: str | None = None
        while True:
            page, after = await self._http.run(calls.list_sessions(after, metadata, self._http.means))
            for info in page:
                yield info
            if after is None:
                return


class AsyncClient:
    """A client of one server: `async with AsyncClient("http://127.0.0.1:8000") as client`.

    `retry`: how long to go on trying when the server cannot be reached or is not ready. `http`: an
    httpx.AsyncClient of yours, for proxies and certificates, which stays yours to close.
    """

    def __init__(
        self,
        base_url: str = URL,
        *,
        api_key: str | None = None,
        retry: Retry | None = None,
        timeout: float = ANSWER,
        silence: float = SILENCE,
        headers: Mapping[str, str] | None = None,
        http: httpx.AsyncClient | None = None,
    ) -> None:
        settings = Settings(base_url, api_key, retry or Retry(), timeout, silence, headers or {})
        self._http = AsyncHttp(settings, http)
        self._opened: set[AsyncTurn | AsyncTools] = set()
        self.sessions = AsyncSessions(self._http, self._opened)

    async def close(self) -> None:
        """Close what was opened: connections, streams, tools that run. Sessions stay, and so do turns."""
        for one in list(self._opened):
            await one.close()
        await self._http.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
