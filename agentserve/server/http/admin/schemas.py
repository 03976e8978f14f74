"""Bodies of the admin routes, and what they reply. Unknown fields of bodies are refused: a limit or a tenant
that was misspelt would otherwise not be there."""

from __future__ import annotations

from typing import Literal

import msgspec


class KeyRequest(msgspec.Struct, forbid_unknown_fields=True):
    """One of the two: whose key it is, or that it is an admin's."""

    tenant: str | None = None
    admin: bool = False


class RotateKeyRequest(msgspec.Struct, forbid_unknown_fields=True):
    grace_seconds: float = 0.0  # that the old key is let in yet


class LimitsRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Limits by their names: a number (sizes may have a unit), "none", or null: as the configuration says."""

    limits: dict[str, int | str | None]


class KeyReply(msgspec.Struct):
    """`key` is there when it is made, and never again."""

    object: str
    id: str
    tenant: str | None
    admin: bool
    created: float
    status: Literal["active", "expiring", "revoked"]
    revoked_at: float | None
    key: str | None = None


class KeyList(msgspec.Struct):
    object: str
    data: list[KeyReply]


class TenantReply(msgspec.Struct):
    """`limits` hold; `set` is what was set here, over the configuration."""

    object: str
    id: str
    keys: int
    sessions: int
    limits: dict[str, int | None]
    set: dict[str, int | str]


class TenantList(msgspec.Struct):
    object: str
    data: list[TenantReply]
