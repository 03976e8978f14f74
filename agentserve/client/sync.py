"""The client without asyncio."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import httpx

from agentserve.client.protocol import calls
from agentserve.client.protocol.errors import ClientError, NotFound, StatusError
from agentserve.client.protocol.events import Call, Receipt, SessionInfo
from agentserve.client.protocol.flow import Flow, JsonObject, Means, Retry
from agentserve.client.protocol.follow import TurnFlow, resume_turn, run_turn
from agentserve.client.protocol.toolbox import Toolbox
from agentserve.client.sync_http import Http
from agentserve.client.sync_tools import Tools
from agentserve.client.sync_turn import Turn
from agentserve.client.wire import ANSWER, SILENCE, URL, Settings
from agentserve.tools import Tool


class Branch:
    """A session on the session routes, such as a fork is: it is carried on by `give`, or by chat requests
    that name it. As a context manager it is closed in the end."""

    def __init__(self, http: Http, id_: str) -> None:
        self._http = http
        self.id = id_

    def describe(self) -> JsonObject:
        """Its state, where its KV is, its pending calls, what was decided about it. NotFound before its first
        turn."""
        return self._http.run(calls.describe(self.id, self._http.means))

    def hint(self, **hints: Any) -> dict[str, Receipt]:
        """`expected_wait` and `deadline` (seconds), `priority`, `final`, `retain`; None takes one back. A
        receipt for each."""
        return self._http.run(calls.hint(self.id, hints, self._http.means))

    def fork(self, at_turn: int | None = None) -> Branch:
        """A session with this one's history, up to a turn, and its KV."""
        made = self._http.run(calls.fork(self.id, at_turn, self._http.means))
        return Branch(self._http, made["id"])

    def give(self, results: Mapping[str, str]) -> JsonObject:
        """Results of calls by their ids: a receipt, or with the last one a chat completion."""
        return self._http.run(calls.give_own(self.id, results, self._http.means))

    def close(self) -> None:
        """NotFound."""
        self._http.run(self._closed(self._http.means))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """One that is gone already is no error. After an exception it is tried once, and is none either."""
        with suppress(NotFound if error is None else ClientError):
            self._http.run(self._closed(self._http.means if error is None else self._http.means.once()))

    def _closed(self, means: Means) -> Flow[None]:
        return calls.close_own(self.id, means)


class Session(Branch):
    """An agent's session, with the tools that are run here. As a context manager it is closed, which deletes
    it, in the end."""

    def __init__(self, http: Http, info: SessionInfo, box: Toolbox, opened: set[Turn | Tools]) -> None:
        super().__init__(http, info.id)
        self.info = info  # as it was when it was created or got
        self._box = box
        self._background = Tools(http, info.id, box, streams=False)
        self._opened = opened

    @property
    def refused(self) -> list[tuple[Call, StatusError]]:
        """Results of background tools that the server did not take."""
        return self._background.refused

    def run(self, text: str | Sequence[str]) -> Turn:
        """Say something. The turn begins when its first event is asked for."""
        return self._turn(run_turn(self.id, text, self._http.means, self._box.background))

    def resume(self) -> Turn:
        """The last turn, from its beginning, in whatever state it is: of a client that went away, or gave up
        for a while. Calls that wait for results are run (again, if they were run before)."""
        return self._turn(resume_turn(self.id, self._http.means, self._box.background))

    def _turn(self, flow: TurnFlow) -> Turn:
        return Turn(self._http, self.id, self._box, flow, background=self._background, opened=self._opened)

    def wait_for_background(self) -> None:
        """Until the tools that run in the background have brought their results, which the model reads with
        its next call. Raises what kept one from being brought."""
        self._background.wait()

    def cancel(self) -> None:
        """End the turn that runs. The session takes the next message."""
        self._http.run(calls.cancel(self.id, self._http.means))

    def decide(self, request: str, *, approve: bool) -> None:
        """What a user says to an `ApprovalAsked`. Conflict where another word was said before."""
        self._http.run(calls.decide(self.id, request, approve, self._http.means))

    def refresh(self) -> SessionInfo:
        self.info = self._http.run(calls.get_session(self.id, self._http.means))
        return self.info

    def items(self) -> list[JsonObject]:
        return self._http.run(calls.all_of(calls.path_of(self.id, "items"), self._http.means))

    def turns(self) -> list[JsonObject]:
        return self._http.run(calls.all_of(calls.path_of(self.id, "turns"), self._http.means))

    def close(self) -> None:
        """A turn that runs is cancelled, and the session is gone. NotFound."""
        self._background.close()
        super().close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._background.close()
        super().__exit__(kind, error, trace)

    def _closed(self, means: Means) -> Flow[None]:
        return calls.delete_session(self.id, means)


class Sessions:
    def __init__(self, http: Http, opened: set[Turn | Tools]) -> None:
        self._http = http
        self._opened = opened

    def create(
        self,
        model: str,
        *,
        instructions: str | None = None,
        tools: Iterable[Tool | JsonObject] = (),
        metadata: Mapping[str, str] | None = None,
        **agent: Any,
    ) -> Session:
        """`tools`: functions made tools by `@tool`, which are run here, or descriptions of others. `agent`:
        more of its fields (`temperature`, `max_output_tokens`, `tool_choice`, …)."""
        box = Toolbox(tools)
        body = {"model": model, "instructions": instructions, "tools": box.described(), **agent}
        info = self._http.run(calls.create_session(body, metadata, self._http.means))
        return Session(self._http, info, box.of(info), self._opened)

    def get(self, id_: str, *, tools: Iterable[Tool | JsonObject] = ()) -> Session:
        """A session that there is. `tools`: those of it that are run here. NotFound."""
        box = Toolbox(tools)
        info = self._http.run(calls.get_session(id_, self._http.means))
        return Session(self._http, info, box.of(info), self._opened)

    def list(self, *, metadata: Mapping[str, str] | None = None) -> Iterator[SessionInfo]:
        """All, the newest first; those with these metadata."""
        after: str | None = None
        while True:
            page, after = self._http.run(calls.list_sessions(after, metadata, self._http.means))
            yield from page
            if after is None:
                return


class Client:
    """A client of one server: `with Client("http://127.0.0.1:8000") as client`.

    `retry`: how long to go on trying when the server cannot be reached or is not ready. `http`: an
    httpx.Client of yours, for proxies and certificates, which stays yours to close.
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
        http: httpx.Client | None = None,
    ) -> None:
        settings = Settings(base_url, api_key, retry or Retry(), timeout, silence, headers or {})
        self._http = Http(settings, http)
        self._opened: set[Turn | Tools] = set()
        self.sessions = Sessions(self._http, self._opened)

    def close(self) -> None:
        """Close what was opened: connections, streams, tools that run. Sessions stay, and so do turns."""
        for one in list(self._opened):
            one.close()
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
