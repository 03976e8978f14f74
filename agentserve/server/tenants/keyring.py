"""Whose key it is that a request brings: keys given at the start, and those of the key file.

A server is open only as long as no key was ever configured. A key given with `--api-key` is the default
tenant's, as all was before there were tenants; it is an admin's too while no admin and no tenant has a
key of its own.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable

from agentserve.server.sessions.identity import DEFAULT_TENANT
from agentserve.server.tenants.keyfile import KeyFile, KeysError
from agentserve.server.tenants.keys import ANYBODY, MOST_CHARS, Caller, GivenKeys, KeyTable

log = logging.getLogger(__name__)


class Keyring:
    def __init__(
        self,
        api_keys: Iterable[str] = (),
        admin_keys: Iterable[str] = (),
        file: KeyFile | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """KeysError or OSError where the key file cannot be used."""
        self._api = GivenKeys(api_keys, "api-key")
        self._admin = GivenKeys(admin_keys, "admin-key")
        self._wall = wall
        self._latest = -math.inf  # that the clock was ever seen to say
        self._file = file
        self._stamp = file.stamp() if file is not None else None
        self._table = file.table() if file is not None else KeyTable(b"")
        self._made = self._stamp is not None  # there was a key file; a server does not open again
        self._failed = False
        self._unwritten = False

    @property
    def closed(self) -> bool:
        """Nobody is let in without a key."""
        return bool(self._api) or bool(self._admin) or self._made

    @property
    def shared(self) -> bool:
        """There are others than those who have the keys that were given at the start."""
        return bool(self._admin) or self._made

    def caller(self, key: str) -> Caller | None:
        """None: it is nobody's."""
        if not self.closed:
            return ANYBODY
        if not key or len(key) > MOST_CHARS or not key.isascii():
            return None
        # All three are asked, whichever it is of: how long it takes tells nothing.
        admin, api, made = self._admin.find(key), self._api.find(key), self._table.caller(key, self._now())
        if admin is not None:
            return Caller(None, admin=True, key=admin)
        if api is not None:
            return Caller(DEFAULT_TENANT, admin=not self.shared, key=api)
        return made

    def holds(self, id_: str) -> bool:
        """Whether the key of this id, which was let in before, still is."""
        if self._api.has(id_) or self._admin.has(id_):
            return True
        return self._table.holds(id_, self._now())

    @property
    def unsettled(self) -> bool:
        """A key's time is over, and the file does not say so yet."""
        return self._file is not None and self._table.next_end <= self._now()

    def settle(self) -> None:
        """Write down what is over: the next server's clock may be another one. From any thread."""
        if self._file is None:
            return
        try:
            self._file.settle(self._now())
            self._unwritten = False
        except (KeysError, OSError) as error:
            if not self._unwritten:
                log.error("it cannot be written which keys are over: %s", error)
            self._unwritten = True

    def _now(self) -> float:
        """A clock that is set back lets no key in again whose time was seen to be over."""
        self._latest = max(self._latest, self._wall())
        return self._latest

    @property
    def file(self) -> KeyFile | None:
        return self._file

    def look(self) -> None:
        """Read the key file again if it has changed. What cannot be read changes nothing; where it is gone,
        so are its keys."""
        if self._file is None:
            return
        stamp = self._file.stamp()
        if stamp == self._stamp and not self._failed:
            return
        try:
            table = self._file.table()
        except (KeysError, OSError) as error:
            if not self._failed:
                log.error("the keys are as they were: %s", error)
            self._failed = True
            return
        self._table, self._stamp, self._failed = table, stamp, False
        self._made = self._made or stamp is not None
        log.info("the keys were read again: %d", len(table))
