"""API keys: how they look, what is kept of them, and whose they are. Pure.

A key is an id, which may be seen by anybody, and 256 random bits. What is kept of those is a SHA-256
keyed with a secret of the server (HMAC). A slow hash (scrypt, Argon2) is for what people make up: it
makes guesses dear. Nobody guesses 256 random bits at any speed, while a hash that takes 50 ms would let
any stranger occupy a core by sending wrong keys, and would delay every request by as much.
"""

from __future__ import annotations

import hmac
import math
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256

import msgspec

from agentserve.server.sessions.identity import DEFAULT_TENANT
from agentserve.tenant_names import KEY_ID_DIGITS, KEY_PREFIX, has_key

PREFIX = KEY_PREFIX
MOST_CHARS = 512  # of what is taken for a key at all
_ID, _SECRET = KEY_ID_DIGITS, 64  # hexadecimal digits
_DIGITS = re.compile(
    r"[0-9a-f]{48}", re.IGNORECASE
)  # most of a secret; no id of a key, session or request has so many
_KEY_ID = re.compile(rf"[0-9a-f]{{{_ID}}}")


@dataclass(frozen=True, slots=True)
class Caller:
    """Whom a request comes from, as its key says."""

    tenant: str | None  # None: an admin's key, which is nobody's
    admin: bool = False
    key: str | None = None  # its id; None: the server is open and asks for none


ANYBODY = Caller(DEFAULT_TENANT, admin=True)
"""Who calls a server that has no keys: whoever is on this machine."""


class KeyRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is kept of a key."""

    id: str
    digest: bytes
    created: float  # Unix time
    tenant: str | None = None  # None: an admin's
    revoked: float | None = None  # from when on it is not let in; ahead, where another took its place
    over: bool = False  # it is let in no more, whatever a clock says that is set back

    @property
    def caller(self) -> Caller:
        return Caller(self.tenant, self.tenant is None, self.id)

    def holds(self, now: float = math.inf) -> bool:
        """Whether it is let in. Without `now`: for good."""
        return not self.over and (self.revoked is None or now < self.revoked)

    def ended(self, at: float, now: float) -> KeyRecord:
        """Let in until then, or as long as it was to be anyway; for good, where that is not ahead."""
        at = min(at, self.revoked if self.revoked is not None else at)
        return msgspec.structs.replace(self, revoked=at, over=self.over or at <= now)

    def settled(self, now: float) -> KeyRecord:
        """What is over stays over."""
        return self if self.over or self.holds(now) else msgspec.structs.replace(self, over=True)


def new_key() -> tuple[str, str]:
    """(id, key)."""
    name = secrets.token_hex(_ID // 2)
    return name, f"{PREFIX}{name}_{secrets.token_hex(_SECRET // 2)}"


def key_id(key: str) -> str | None:
    """The id in a key; None: it is none of ours."""
    if len(key) != len(PREFIX) + _ID + 1 + _SECRET or not key.startswith(PREFIX):
        return None
    name, mark, _ = key.removeprefix(PREFIX).partition("_")
    return name if mark and len(name) == _ID else None


def is_key_id(text: str) -> bool:
    return _KEY_ID.fullmatch(text) is not None


def may_be_secret(text: str) -> bool:
    """A part of a key that nobody is to read."""
    return has_key(text) or _DIGITS.search(text) is not None


def digest(pepper: bytes, key: str) -> bytes:
    return hmac.digest(pepper, key.encode("utf-8", "surrogatepass"), sha256)


class KeyTable:
    """Keys by their ids."""

    def __init__(self, pepper: bytes, records: Iterable[KeyRecord] = ()) -> None:
        self._pepper = pepper
        self._records = {record.id: record for record in records}
        self._nobody = digest(pepper, "")
        ends = (r.revoked for r in self._records.values() if r.revoked is not None and not r.over)
        self.next_end = min(ends, default=math.inf)  # of a key that was let in when this was read

    def __len__(self) -> int:
        return len(self._records)

    def holds(self, id_: str, now: float) -> bool:
        record = self._records.get(id_)
        return record is not None and record.holds(now)

    def caller(self, key: str, now: float = math.inf) -> Caller | None:
        """Whose key it is; None: nobody's, or no longer. The digests are compared in constant time."""
        record = self._records.get(key_id(key) or "")
        known = self._nobody if record is None else record.digest
        same = hmac.compare_digest(digest(self._pepper, key), known)
        return record.caller if same and record is not None and record.holds(now) else None


class GivenKeys:
    """Keys that the operator made up and gave at the start. They have no ids, so all are compared, each in
    constant time; what is remembered of them are digests under a secret of this process."""

    def __init__(self, keys: Iterable[str], name: str) -> None:
        self._pepper = secrets.token_bytes(32)
        self._known = [(f"{name}-{i}", digest(self._pepper, key)) for i, key in enumerate(keys, 1)]

    def __len__(self) -> int:
        return len(self._known)

    def has(self, name: str) -> bool:
        return any(name == one for one, _ in self._known)

    def find(self, key: str) -> str | None:
        """The name of this key: which of them it is."""
        given = digest(self._pepper, key)
        found = [name for name, known in self._known if hmac.compare_digest(given, known)]
        return found[0] if found else None
