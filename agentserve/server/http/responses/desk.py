"""What this dialect remembers: responses, conversations, those that are being made, and recent prompts."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from agentserve.server.errors import ApiError
from agentserve.server.http.responses.conversations import Conversations
from agentserve.server.http.responses.diagnostics import Compared
from agentserve.server.http.responses.live import Live
from agentserve.server.http.responses.records import Records
from agentserve.server.http.responses.shelf import Kept, Shelf
from agentserve.server.sessions.transcript import write_json
from agentserve.server.text_port import JsonObject

_SHOWN = 8  # damages that `health` tells of, the latest


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of what is kept. `ttl`: seconds since a response was made."""

    responses: int = 100_000
    responses_bytes: int = 256 << 20
    ttl: float = 30 * 86400.0
    conversations: int = 10_000
    conversations_bytes: int = 128 << 20
    compared_bytes: int = 64 << 20  # token ids, in memory only
    events_bytes: int = 64 << 20  # of background responses that are over, in memory only
    running: int = 256  # in the background, at once


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(24)}"


class Desk:
    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        bounds: Bounds | None = None,
        records: Records | None = None,
    ) -> None:
        """`records`: on disk; None: all of it ends with the server."""
        bounds = bounds or Bounds()
        self._bounds = bounds
        self.records = records
        self.shelf = Shelf(
            wall,
            max_count=bounds.responses,
            max_bytes=bounds.responses_bytes,
            ttl=bounds.ttl,
            book=records,
        )
        self.conversations = Conversations(
            wall, max_count=bounds.conversations, max_bytes=bounds.conversations_bytes, book=records
        )
        self._live: OrderedDict[str, Live] = OrderedDict()
        self._live_bytes = 0  # of those that are over
        self._compared: OrderedDict[str, Compared] = OrderedDict()
        self._compared_bytes = 0
        if records is not None:
            records.content_of = self._content
            self.shelf.restore(records.responses)
            self.conversations.restore(records.conversations)
            records.responses, records.conversations = [], []
            for kept in self.shelf:
                if kept.running:
                    self.shelf.put(_broken_off(kept))

    async def close(self) -> None:
        if self.records is not None:
            await self.records.close()

    def health(self) -> JsonObject:
        """How the disk that keeps all this does; nothing where there is none."""
        records = self.records
        if records is None:
            return {}
        told: JsonObject = {"state": "ok", "skipped": records.skipped}
        if records.failure is not None:
            since, reason = round(records.failure.since, 3), records.failure.reason
            told |= {"state": "failing", "since": since, "reason": reason}
        if records.damages:
            told["damages"] = [
                {"reason": damage.reason, "kept": damage.kept, "missing_records": damage.missing}
                for damage in records.damages[-_SHOWN:]
            ]
        return {"responses_disk": told}

    def faults(self) -> list[JsonObject]:
        """What keeps responses from being kept; they are refused or fail then."""
        failure = self.records.failure if self.records is not None else None
        if failure is None:
            return []
        return [{"part": "responses_disk", "reason": failure.reason, "since": round(failure.since, 3)}]

    # --- being made --------------------------------------------------------------------

    def live(self, id_: str) -> Live | None:
        """A background response that is being made, or whose events are still here."""
        return self._live.get(id_)

    def check_room(self) -> None:
        """ApiError where as many run in the background as may: nobody's connection bounds them."""
        running = sum(not live.over for live in self._live.values())
        if running >= self._bounds.running:
            raise ApiError(
                f"{running} responses are being made in the background, and no more may be. "
                "Please try again in 5s.",
                status=429,
                code="rate_limit_exceeded",
                headers={"retry-after": "5", "x-should-retry": "true"},
            )

    def begin(self, live: Live) -> None:
        self._live[live.id] = live

    def over(self, live: Live) -> None:
        """Its events stay as long as there is room for them."""
        live.end()
        if live.id in self._live:
            self._live_bytes += live.size_bytes
            self._live.move_to_end(live.id)
        for other in list(self._live.values()):
            if self._live_bytes <= self._bounds.events_bytes:
                return
            self.forget(other)

    def forget(self, live: Live) -> None:
        if live.over and self._live.pop(live.id, None) is not None:
            self._live_bytes -= live.size_bytes

    # --- recent prompts ----------------------------------------------------------------

    def compared(self, id_: str) -> Compared | None:
        return self._compared.get(id_)

    def remember(self, id_: str, compared: Compared) -> None:
        self._compared[id_] = compared
        self._compared_bytes += compared.cost
        while self._compared_bytes > self._bounds.compared_bytes:
            _, oldest = self._compared.popitem(last=False)
            self._compared_bytes -= oldest.cost

    def _content(self, name: str) -> bytes | None:
        conversation = self.conversations.get(name)
        if conversation is not None:
            return msgspec.msgpack.encode(conversation)
        return self.shelf.encoded(name)


def _broken_off(kept: Kept) -> Kept:
    """A background response that ran when the server died."""
    response = kept.shown()
    response["status"] = "failed"
    response["output"] = []
    response["error"] = {
        "code": "server_error",
        "message": "The server was started again before the response was done.",
    }
    return msgspec.structs.replace(
        kept, response=write_json(response), running=False, sequence=kept.sequence + 1
    )
