"""What each tenant may ask for: as the configuration file says, but for what an admin has said since.

What admins say is kept beside the keys, in a file of its own; without a data directory nothing is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from agentserve.server.tenants.keyfile import KeysError, locked, write_whole
from agentserve.tenant_limits import TenantLimits, TenantsConfig, read_limits
from agentserve.tenant_names import is_tenant
from agentserve.values import ConfigError

VERSION = 1
MOST_TENANTS = 10_000
Said = dict[str, int | str]  # limits by their names; "none" takes one away


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    tenants: dict[str, Said]


class LimitsOf(Protocol):
    def of(self, tenant: str) -> TenantLimits: ...


class Terms:
    def __init__(self, config: TenantsConfig | None = None, folder: Path | None = None) -> None:
        """KeysError, OSError where what was said cannot be read."""
        self._config = config or TenantsConfig()
        self._path = None if folder is None else folder / "limits.json"
        self._said = self._read()
        self._limits = {tenant: self._made(tenant, said) for tenant, said in self._said.items()}

    def of(self, tenant: str) -> TenantLimits:
        found = self._limits.get(tenant)
        return self._config.of(tenant) if found is None else found

    def said(self, tenant: str) -> Said:
        """What differs from the configuration."""
        return dict(self._said.get(tenant, {}))

    def named(self) -> frozenset[str]:
        """Tenants of whom something was said, here or in the configuration."""
        return frozenset(self._said) | frozenset(self._config.named)

    def say(self, tenant: str, changes: Mapping[str, int | str | None]) -> None:
        """From now on a tenant has these limits; None: as the configuration has it. Blocks: it is on disk
        when this returns. KeysError, OSError; then nothing has changed."""
        if self._path is None:
            raise KeysError("limits are kept in a data directory, and there is none")
        if not is_tenant(tenant):
            raise KeysError(f"{tenant[:80]!r}: a tenant's name is 1 to 64 of A-Z a-z 0-9 . _ : -")
        with locked(self._path.parent):
            said = {name: value for name, value in self.said(tenant).items() if name not in changes}
            said |= {name: value for name, value in changes.items() if value is not None}
            limits = self._made(tenant, said)
            everybody = {name: theirs for name, theirs in self._said.items() if name != tenant}
            if said:
                everybody[tenant] = said
            if len(everybody) > MOST_TENANTS:
                raise KeysError(f"limits of {MOST_TENANTS} tenants were set, and no more may be")
            encoded = msgspec.json.encode(_Document(VERSION, everybody))
            write_whole(self._path, msgspec.json.format(encoded, indent=1))
        self._said = everybody
        if said:
            self._limits[tenant] = limits
        else:
            self._limits.pop(tenant, None)

    def _made(self, tenant: str, said: Said) -> TenantLimits:
        try:
            return read_limits(said, "limits", self._config.of(tenant))
        except ConfigError as error:
            raise KeysError(str(error)) from None

    def _read(self) -> dict[str, Said]:
        if self._path is None:
            return {}
        try:
            document = msgspec.json.decode(self._path.read_bytes(), type=_Document)
        except FileNotFoundError:
            return {}
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise KeysError(f"{self._path}: not a file of limits: {error}") from None
        if document.version != VERSION:
            raise KeysError(f"{self._path}: version {document.version}, this is a server of {VERSION}")
        return document.tenants
