"""What one tenant may ask of a server: frozen values, and how the configuration file says them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from agentserve.tenant_names import has_key, is_tenant
from agentserve.values import ConfigError, above_zero, at_least, read, size, text


class TenantLimits(msgspec.Struct, frozen=True):
    """Of one tenant; None: no limit of its own. What the server can do bounds all of them anyway."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # prompt and answer, cached or not
    concurrent_turns: int | None = None
    sessions: int | None = None  # the longest unused of its own goes for a new one
    stored_bytes: int | None = None  # of its sessions; and of its responses and conversations
    request_bytes: int | None = None  # of one body


class TenantsConfig(msgspec.Struct, frozen=True):
    """The limits of every tenant: those of all, but for what is said of one by its name."""

    all: TenantLimits = TenantLimits()
    named: dict[str, TenantLimits] = {}
    weights: dict[str, float] = {}  # shares of the machine beside others; 1 for who is not named
    classes: dict[str, str] = {}  # of promises (`slo_classes`), for requests that name none

    def of(self, tenant: str) -> TenantLimits:
        return self.named.get(tenant, self.all)


NO_LIMITS = TenantLimits()
MOST = 10**12
_READERS: Mapping[str, Callable[[object], int]] = {
    "requests_per_minute": at_least(1, MOST),
    "tokens_per_minute": at_least(1, MOST),
    "concurrent_turns": at_least(1, MOST),
    "sessions": at_least(1, MOST),
    "stored_bytes": size,
    "request_bytes": size,
}
NONE = "none"


def read_limits(raw: object, where: str, base: TenantLimits = NO_LIMITS) -> TenantLimits:
    """A table of limits over `base`; "none" takes one away. ConfigError names the place."""
    if not isinstance(raw, dict):
        raise ConfigError(f"{where}: expected a table of limits")
    values: dict[str, int | None] = {}
    for name, value in raw.items():
        reader = _READERS.get(name)
        if reader is None:
            raise ConfigError(f"{where} {name}: unknown limit; limits are {', '.join(_READERS)}")
        try:
            values[name] = None if value == NONE else reader(value)
        except ConfigError as error:
            raise ConfigError(f'{where} {name}: {error}, or "{NONE}", got {str(value)[:80]}') from None
    return msgspec.structs.replace(base, **values)


def read_tenants(limits: object, tenants: object, file: str) -> TenantsConfig:
    """The file's [limits], of all tenants, and its [tenants.NAME], each over those."""
    of_all = read_limits({} if limits is None else limits, f"{file}: [limits]")
    if tenants is None:
        return TenantsConfig(of_all)
    if not isinstance(tenants, dict):
        raise ConfigError(f"{file}: [tenants]: expected a table for each tenant")
    if any(has_key(name) for name in tenants):  # which is not repeated here
        raise ConfigError(f"{file}: [tenants.NAME]: a tenant cannot be called like a key")
    for name in tenants:
        if not is_tenant(name):
            raise ConfigError(
                f"{file}: [tenants.{name[:80]}]: a tenant's name is 1 to 64 of A-Z a-z 0-9 . _ : -"
            )
    named: dict[str, TenantLimits] = {}
    weights: dict[str, float] = {}
    classes: dict[str, str] = {}
    for name, raw in tenants.items():
        where = f"{file}: [tenants.{name}]"
        if isinstance(raw, dict):
            raw = dict(raw)
            if "weight" in raw:
                weights[name] = read(above_zero, raw.pop("weight"), f"{where} weight")
            if "slo" in raw:
                classes[name] = read(text, raw.pop("slo"), f"{where} slo")
        named[name] = read_limits(raw, where, of_all)
    return TenantsConfig(of_all, named, weights, classes)
