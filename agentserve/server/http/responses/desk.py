"""What this dialect remembers: responses, conversations, those that are being made, and recent prompts."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from agentserve.server.http.responses.conversations import Conversations
from agentserve.server.http.responses.diagnostics import Compared
from agentserve.server.http.responses.live import Live, Lives
from agentserve.server.http.responses.records import Records
from agentserve.server.http.responses.shelf import Kept, Shelf
from agentserve.server.http.responses.spent import Spent
from agentserve.server.sessions.transcript import write_json
from agentserve.server.text_port import JsonObject

_SHOWN = 8  # damages that `health` tells of, the latest


@dataclass(frozen=True, slots=True)
class DeskBounds:
    """Of what is kept. `ttl`: seconds since a response was made."""

    responses: int = 100_000
    responses_bytes: int = 256 << 20
    ttl: float = 30 * 86400.0
    conversations: int = 10_000
    conversations_bytes: int = 128 << 20
    compared_bytes: int = 64 << 20  # token ids, in memory only
    events_bytes: int = 64 << 20  # of background responses, in memory only
    one_events_bytes: int = 8 << 20  # of one of them
    running: int = 256  # in the background, at once


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(24)}"


class Desk:
    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        bounds: DeskBounds | None = None,
        records: Records | None = None,
    ) -> None:
        """`records`: on disk; None: all of it ends with the server."""
        bounds = bounds or DeskBounds()
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
            max_count=bounds.conversations, max_bytes=bounds.conversations_bytes, book=records
        )
        self.spent = Spent(wall, ttl=bounds.ttl, book=records)
        self.lives = Lives(
            most_running=bounds.running,
            most_bytes=bounds.events_bytes,
            one_bytes=bounds.one_events_bytes,
        )
        self._compared: OrderedDict[tuple[str, str], Compared] = OrderedDict()
        self._compared_bytes = 0
        if records is not None:
            records.content_of = self._content
            self.shelf.restore(records.responses)
            records.skipped += self.conversations.restore(records.conversations, records.parts)
            self.spent.restore(records.spent)
            records.spent = []
            records.responses, records.conversations, records.parts = [], [], {}
            for kept in self.shelf:
                if kept.running:
                    self.shelf.put(_broken_off(kept))

    async def close(self) -> None:
        if self.records is not None:
            await self.records.close()

    async def ready(self) -> None:
        """Refuse what could not be kept before anything is computed for it. StorageFailed."""
        if self.records is not None:
            await self.records.ready()

    def health(self) -> JsonObject:
        """How the disk that keeps all this does; nothing where there is none."""
        records = self.records
        if records is None:
            return {}
        told: JsonObject = {"state": "ok", "skipped": records.skipped}
        if records.failure is not None:
            records.retry()  # the next to look may see it well
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

    def counts(self) -> tuple[float, ...]:
        """For `Metrics.set_responses`."""
        records = self.records
        return (
            len(self.shelf),
            self.shelf.size_bytes,
            len(self.conversations),
            self.conversations.size_bytes,
            self.lives.running,
            self.lives.size_bytes,
            records is not None and records.failure is not None,
            0 if records is None else records.skipped,
        )

    def bytes_of(self, tenant: str) -> int:
        """What is kept of a tenant's responses and conversations."""
        return self.shelf.bytes_of(tenant) + self.conversations.bytes_of(tenant)

    def live(self, id_: str) -> Live | None:
        """A background response that is being made, or whose events are still here."""
        return self.lives.get(id_)

    # --- recent prompts ----------------------------------------------------------------

    def compared(self, tenant: str, id_: str) -> Compared | None:
        return self._compared.get((tenant, id_))

    def remember(self, tenant: str, id_: str, compared: Compared) -> None:
        self._compared[tenant, id_] = compared
        self._compared_bytes += compared.cost
        while self._compared_bytes > self._bounds.compared_bytes:
            _, oldest = self._compared.popitem(last=False)
            self._compared_bytes -= oldest.cost

    def _content(self, name: str) -> bytes | None:
        return self.conversations.encoded(name) or self.spent.encoded(name) or self.shelf.encoded(name)


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
        kept, response=write_json(response), running=False, sequence=kept.sequence + 1, untold=True
    )
