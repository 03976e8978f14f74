"""The ledger, kept: what is accepted is on disk, synced, before whoever asked is told so.

On the event loop. Everything is in memory (and bounded); the disk is read at a start. While it fails,
nothing is accepted; deliveries that were accepted go on, and what came of them is written when it is back.
Secrets are in the file, which is for its owner alone, and are shown when they are made and never again.
"""

from __future__ import annotations

import asyncio
import logging
import secrets as system_random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

import msgspec

from tools_bridge.webhooks.address import AddressPolicy, Refused, parse
from tools_bridge.webhooks.callback import KEY_BYTES, CallbackTokens
from tools_bridge.webhooks.ledger import Ledger, OutboxLimits, Touched
from tools_bridge.webhooks.signing import Secret, make_secret, rotated
from tools_bridge.webhooks.store import Change, StorageError, Store, Table
from tools_bridge.webhooks.types import (
    Attempt,
    Delivery,
    Ending,
    Endpoint,
    Key,
    NotKept,
    OutboxFull,
    WebhookError,
    Why,
)
from tools_bridge.webhooks.writer import Failure, Writer

log = logging.getLogger(__name__)

PATIENCE = 30.0  # seconds that a client waits for the disk
LAST_PATIENCE = 10.0  # seconds the last writes may take when the server leaves
MOST_NAME, MOST_EVENT_TYPES, MOST_EVENT_TYPE = 200, 64, 128
SECRET_BYTES = 32
_CALLBACK_KEY = b"callback_key"


class BadEndpoint(WebhookError):
    """What was asked for an endpoint cannot be."""


class Outbox:
    def __init__(
        self,
        folder: Path | None,
        policy: AddressPolicy,
        now: Callable[[], float],
        limits: OutboxLimits | None = None,
        *,
        random_bytes: Callable[[int], bytes] = system_random.token_bytes,
        patience: float = PATIENCE,
        open_store: Callable[[Path], Store] = Store,
    ) -> None:
        """`folder` None: in memory only. `now`: Unix time. ValueError, in one line, where it cannot be kept
        there."""
        self.ledger = Ledger(limits)
        self.skipped = 0  # records that could not be read at the start
        self._policy = policy
        self._now = now
        self._random = random_bytes
        self._patience = patience
        self._loop: asyncio.AbstractEventLoop | None = None
        self._with_body: set[Key] = set()  # deliveries whose body was put
        self._callback_key = random_bytes(KEY_BYTES)
        self._store = None if folder is None else open_store(folder)
        self._writer = None if self._store is None else Writer(self._store, now, self._on_damage)
        if self._store is not None:
            self._read(self._store)
            self._put([(Table.META, _CALLBACK_KEY, self._callback_key)], lasting=True)
        self.tokens = CallbackTokens(self._callback_key)

    @property
    def failure(self) -> Failure | None:
        """Why nothing is kept now; None: all is well."""
        return None if self._writer is None else self._writer.failure

    @property
    def hung(self) -> bool:
        """The disk has not answered for so long that nobody should wait for it."""
        return self._writer is not None and self._writer.hung

    @property
    def damages(self) -> Sequence[str]:
        """What was wrong with the file, since the start."""
        return () if self._store is None else self._store.damages

    async def close(self) -> None:
        """Write what is left, and let another server in. Nobody may be delivering any more."""
        if self._writer is None or self._store is None:
            return
        self._put_touched(lasting=True)
        if await asyncio.to_thread(self._writer.close, 0.0 if self._writer.hung else LAST_PATIENCE):
            self._store.close()
        else:
            log.error("the disk takes too long: the last changes of webhooks may be lost")

    # --- endpoints -------------------------------------------------------------------

    async def create_endpoint(
        self, owner: str, name: str, url: str, event_types: Sequence[str], form: str = ""
    ) -> tuple[Endpoint, str]:
        """With its secret, which is told this once. BadEndpoint, OutboxFull, NotKept."""
        now, secret = self._now(), make_secret(self._random(SECRET_BYTES))
        endpoint = Endpoint(
            id=f"we_{self._random(12).hex()}",
            owner=owner,
            name=_name(name),
            url=self._url(url),
            event_types=_event_types(event_types),
            secrets=(Secret(secret),),
            created=now,
            updated=now,
            form=form,
        )
        self.ledger.add_endpoint(endpoint)
        try:
            await self._keep(lasting=False)
        except NotKept:
            self.ledger.remove_endpoint(endpoint.id, now)
            self._put_touched(lasting=True)
            raise
        return endpoint, secret

    async def update_endpoint(
        self,
        endpoint_id: str,
        *,
        name: str | None = None,
        url: str | None = None,
        event_types: Sequence[str] | None = None,
        form: str | None = None,
    ) -> Endpoint:
        """What is None stays. BadEndpoint, UnknownEndpoint, NotKept."""
        was = self.ledger.endpoint(endpoint_id)
        new = msgspec.structs.replace(
            was,
            name=was.name if name is None else _name(name),
            url=was.url if url is None else self._url(url),
            event_types=was.event_types if event_types is None else _event_types(event_types),
            form=was.form if form is None else form,
        )
        return was if new == was else await self._change(was, new)

    async def rotate_secret(self, endpoint_id: str, keep_seconds: float) -> tuple[Endpoint, str]:
        """A new secret; the one before signs beside it for so long. UnknownEndpoint, NotKept."""
        was, secret = self.ledger.endpoint(endpoint_id), make_secret(self._random(SECRET_BYTES))
        new = rotated(was.secrets, secret, self._now(), keep_seconds)
        return await self._change(was, msgspec.structs.replace(was, secrets=new)), secret

    async def enable_endpoint(self, endpoint_id: str) -> Endpoint:
        """UnknownEndpoint, NotKept."""
        was = self.ledger.endpoint(endpoint_id)
        return await self._change(was, msgspec.structs.replace(was, disabled="")) if was.disabled else was

    def disable_endpoint(self, endpoint_id: str, why: str) -> list[Delivery]:
        """What was pending for it ends: those. UnknownEndpoint."""
        was, now = self.ledger.endpoint(endpoint_id), self._now()
        self.ledger.change_endpoint(msgspec.structs.replace(was, disabled=why, updated=now))
        ended = self.ledger.close_endpoint(endpoint_id, Why.ENDPOINT_DISABLED, why, now)
        self._put_touched(lasting=True)
        return ended

    def delete_endpoint(self, endpoint_id: str) -> list[Delivery]:
        """What was pending for it ends: those. UnknownEndpoint."""
        ended = self.ledger.remove_endpoint(endpoint_id, self._now())
        self._put_touched(lasting=True)
        return ended

    async def _change(self, was: Endpoint, new: Endpoint) -> Endpoint:
        new = msgspec.structs.replace(new, updated=self._now())
        self.ledger.change_endpoint(new)
        try:
            await self._keep(lasting=False)
        except NotKept:
            if self.ledger.endpoints.get(was.id) == new:  # nobody changed it meanwhile
                self.ledger.change_endpoint(was)
            self._put_touched(lasting=True)
            raise
        return new

    # --- deliveries ------------------------------------------------------------------

    async def accept(self, deliveries: Sequence[Delivery], body: bytes, *, spare: bool = False) -> list[Key]:
        """One event's: those that are new. All or none; with `spare`, those that there is room for, if there
        is for any. Errors of `Ledger.accept`; NotKept."""
        if self.hung:
            raise NotKept("the disk does not answer")
        new: list[Delivery] = []
        try:
            taken: list[Delivery] = []
            for delivery in deliveries:
                try:
                    if self.ledger.accept(delivery, body):
                        new.append(delivery)
                    taken.append(delivery)
                except OutboxFull:
                    if not spare or (delivery is deliveries[-1] and not taken):
                        raise
            await self._keep(lasting=False)
            if not all(self.ledger.find(delivery.key) for delivery in taken):
                raise NotKept("the disk did not take it")  # for who asked first and was waited for
        except BaseException:  # also who stops waiting: it was promised nothing
            for delivery in new:
                self.ledger.unaccept(delivery.key)
            self._put_touched(lasting=True)
            raise
        return [delivery.key for delivery in new]

    def attempted(self, key: Key, attempt: Attempt, next_at: float) -> Delivery:
        delivery = self.ledger.attempted(key, attempt, next_at)
        self._put_touched(lasting=True)
        return delivery

    def end(self, key: Key, ending: Ending, attempt: Attempt | None = None) -> Delivery:
        delivery = self.ledger.end(key, ending, self._now(), attempt)
        self._put_touched(lasting=True)
        return delivery

    def acknowledge(self, key: Key) -> bool:
        known = self.ledger.acknowledge(key)
        self._put_touched(lasting=True)
        return known

    async def replay(self, key: Key) -> None:
        """Errors of `Ledger.replay`; NotKept: then it is as it was."""
        was = self.ledger.replay(key, self._now())
        try:
            await self._keep(lasting=False)
        except NotKept:
            self.ledger.unreplay(was)
            self._put_touched(lasting=True)
            raise

    async def kept(self) -> None:
        """Wait until all that was changed so far is on disk. NotKept."""
        await self._keep(lasting=True)

    # --- records ---------------------------------------------------------------------

    async def _keep(self, lasting: bool) -> None:
        done = self._put_touched(lasting)
        if done is None or self._writer is None:
            return
        try:
            await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(done)), self._patience)
        except TimeoutError:
            self._writer.overdue()
            raise NotKept(f"the disk has not answered for {self._patience:g} s") from None
        except StorageError as error:
            raise NotKept(str(error)) from error

    def _put_touched(self, lasting: bool) -> Future[None] | None:
        touched = self.ledger.take_touched()
        if self._writer is None:
            return None
        with suppress(RuntimeError):
            self._loop = asyncio.get_running_loop()
        changes = [change for name, thing in touched for change in self._changes(name, thing)]
        return self._put(changes, lasting)

    def _put(self, changes: Sequence[Change], lasting: bool) -> Future[None] | None:
        if self._writer is None:
            return None
        done = self._writer.put(changes, lasting)
        done.add_done_callback(Future.exception)  # that it failed is in `failure`
        return done

    def _changes(self, name: str | Key, thing: Touched | None, whole: bool = False) -> list[Change]:
        if isinstance(name, str):
            content = None if thing is None else msgspec.msgpack.encode(thing)
            return [(Table.ENDPOINTS, name.encode(), content)]
        record = "\0".join(name).encode()
        if thing is None:
            self._with_body.discard(name)
            return [(Table.DELIVERIES, record, None), (Table.BODIES, record, None)]
        changes: list[Change] = [(Table.DELIVERIES, record, msgspec.msgpack.encode(thing))]
        if whole or name not in self._with_body:
            self._with_body.add(name)
            changes.append((Table.BODIES, record, self.ledger.body(name)))
        return changes

    def _on_damage(self, reason: str) -> None:
        """On the writer's thread: what the file lost is here."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._rebuild, reason)

    def _rebuild(self, reason: str) -> None:
        if self._writer is None:
            return
        everything = self.ledger.everything()
        changes = [change for name, thing in everything for change in self._changes(name, thing, whole=True)]
        changes.append((Table.META, _CALLBACK_KEY, self._callback_key))
        self._writer.rebuild(changes, reason).add_done_callback(Future.exception)

    def _read(self, store: Store) -> None:
        endpoints: list[Endpoint] = []
        deliveries: dict[bytes, Delivery] = {}
        bodies: dict[bytes, bytes] = {}
        gone: list[Change] = []
        for table, name, content in store.found:
            try:
                match table:
                    case Table.ENDPOINTS:
                        endpoints.append(msgspec.msgpack.decode(content, type=Endpoint))
                    case Table.DELIVERIES:
                        deliveries[name] = msgspec.msgpack.decode(content, type=Delivery)
                    case Table.BODIES:
                        bodies[name] = content
                    case Table.META:
                        if name == _CALLBACK_KEY and len(content) == KEY_BYTES:
                            self._callback_key = content
            except ValueError:  # msgspec's and Unicode's are, too
                self.skipped += 1
                gone.append((table, name, None))
        whole = [(delivery, bodies[name]) for name, delivery in deliveries.items() if name in bodies]
        lone = deliveries.keys() ^ bodies.keys()
        self.skipped += len(deliveries.keys() - bodies.keys())
        gone += [(table, name, None) for name in lone for table in (Table.DELIVERIES, Table.BODIES)]
        if self.skipped:
            log.error("%d record(s) of webhooks could not be read", self.skipped)
        store.found = []
        self._with_body = {delivery.key for delivery, _ in whole}
        self.ledger.restore(endpoints, whole, self._now())
        self._put(gone, lasting=True)
        self._put_touched(lasting=True)

    def _url(self, url: str) -> str:
        try:
            parse(url, self._policy)
        except Refused as refused:
            raise BadEndpoint(str(refused)) from None
        return url


def _name(name: str) -> str:
    if len(name) > MOST_NAME or not name.isprintable():
        raise BadEndpoint(f"a name has at most {MOST_NAME} printable characters")
    return name


def _event_types(types: Sequence[str]) -> tuple[str, ...]:
    if not 0 < len(types) <= MOST_EVENT_TYPES:
        raise BadEndpoint(f"an endpoint takes 1 to {MOST_EVENT_TYPES} event types")
    if not all(0 < len(kind) <= MOST_EVENT_TYPE and kind.isprintable() for kind in types):
        raise BadEndpoint(f"an event type has 1 to {MOST_EVENT_TYPE} printable characters")
    return tuple(dict.fromkeys(types))
