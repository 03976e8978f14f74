"""Service-level objectives: named classes of promises, who may have them, and what a turn is promised.

The configuration file says them in `[slo]`; what a request, its tenant and the file say together comes to one
`Promise` here and nowhere else. Times are in seconds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from agentserve.types import NO_SLO, Slo
from agentserve.values import ConfigError, boolean, positive_seconds, read, text, text_list

KINDS = ("ttft", "tbt", "gap", "tpot", "total")  # fields of Slo
NAME_CHARS = 64
_NAME = re.compile(rf"[A-Za-z0-9._:-]{{1,{NAME_CHARS}}}")
_RESERVED = ("auto",)  # what clients send who mean nothing


class SloClass(msgspec.Struct, frozen=True):
    slo: Slo = NO_SLO
    shed: bool = False  # turns that the queue cannot keep it to are refused, rather than served late
    tenants: tuple[str, ...] | None = None  # who may have it; None: everybody

    def allows(self, tenant: str) -> bool:
        return self.tenants is None or tenant in self.tenants


class SloConfig(msgspec.Struct, frozen=True):
    classes: dict[str, SloClass] = {}
    default: str | None = None  # the class of whoever names none, where he may have it
    own: bool = True  # requests may say times of their own


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request says. None: nothing."""

    name: str | None = None  # of a class
    times: Mapping[str, float] | None = None  # by kind: instead of the class's
    shed: bool | None = None
    tier: str | None = None  # a class, if there is one of that name for the tenant: else it says nothing


NOTHING_ASKED = Asked()


class Promise(msgspec.Struct, frozen=True):
    """What a turn is promised."""

    slo: Slo = NO_SLO
    shed: bool = False
    name: str | None = None  # of the class it comes from


NO_PROMISE = Promise()


class BadPromise(ValueError):
    """A request asks for what it cannot have: one line for its client, and the part of `slo` it is of."""

    def __init__(self, message: str, part: str) -> None:
        super().__init__(message)
        self.part = part


class Promises:
    """What turns are promised: the request's class, else its tenant's, else the default; and instead of the
    class's times those that the request says."""

    def __init__(self, config: SloConfig, of_tenants: Mapping[str, str]) -> None:
        """of_tenants: the class of a tenant's requests that name none."""
        self._config = config
        self._of_tenants = of_tenants

    def of(self, tenant: str, asked: Asked = NOTHING_ASKED) -> Promise:
        """BadPromise."""
        name = self._name(tenant, asked)
        found = self._config.classes[name] if name is not None else SloClass()
        slo = found.slo
        if asked.times:
            if not self._config.own:
                raise BadPromise("this server takes no times of requests; name a class", "slo")
            try:
                slo = msgspec.structs.replace(slo, **asked.times)
            except ValueError as error:
                raise BadPromise(str(error), str(error).partition(":")[0]) from None
        return Promise(slo, found.shed if asked.shed is None else asked.shed, name)

    def _name(self, tenant: str, asked: Asked) -> str | None:
        classes = self._config.classes
        if asked.name is not None:
            if asked.name not in classes or not classes[asked.name].allows(tenant):
                # Who may not have a class is not told that it is there.
                known = [name for name, each in classes.items() if each.allows(tenant)]
                there = f"classes are {', '.join(known)}" if known else "there is none"
                raise BadPromise(
                    f"there is no class {asked.name[:NAME_CHARS]!r} for this tenant; {there}", "class"
                )
            return asked.name
        for name in (asked.tier, self._of_tenants.get(tenant), self._config.default):
            if name is not None and name in classes and classes[name].allows(tenant):
                return name
        return None


# --- the configuration file ------------------------------------------------------------------

_READERS: Mapping[str, Callable[[object], object]] = {
    **dict.fromkeys(KINDS, positive_seconds),
    "shed": boolean,
    "tenants": text_list,
}
_SETTINGS: Mapping[str, Callable[[object], object]] = {"default": text, "own": boolean}


def read_slo(raw: object, file: str) -> SloConfig:
    """The file's [slo]: settings of all, and a table for each class. ConfigError names the place."""
    if raw is None:
        return SloConfig()
    if not isinstance(raw, dict):
        raise ConfigError(f"{file}: [slo]: expected a table")
    classes: dict[str, SloClass] = {}
    values: dict[str, object] = {}
    for name, value in raw.items():
        if isinstance(value, dict):
            if not _NAME.fullmatch(name) or name in (*_SETTINGS, *_RESERVED):
                raise ConfigError(f"{file}: [slo.{name[:80]}]: a class cannot be called so")
            classes[name] = _read_class(value, f"{file}: [slo.{name}]")
            continue
        reader = _SETTINGS.get(name)
        if reader is None:
            raise ConfigError(f"{file}: [slo] {name}: unknown setting; they are {', '.join(_SETTINGS)}")
        values[name] = read(reader, value, f"{file}: [slo] {name}")
    default = values.get("default")
    if default is not None and default not in classes:
        raise ConfigError(f'{file}: [slo] default: there is no class "{default}"')
    return msgspec.convert({"classes": classes, **values}, SloConfig, from_attributes=True)


def _read_class(raw: dict[str, object], where: str) -> SloClass:
    values: dict[str, object] = {}
    for name, value in raw.items():
        reader = _READERS.get(name)
        if reader is None:
            raise ConfigError(f"{where} {name}: unknown; a class has {', '.join(_READERS)}")
        values[name] = read(reader, value, f"{where} {name}")
    times = {name: values.pop(name) for name in KINDS if name in values}
    if not times:
        raise ConfigError(f"{where}: a class promises at least one of {', '.join(KINDS)}")
    shed = bool(values.get("shed"))
    if shed and not {"ttft", "total"} & set(times):
        raise ConfigError(f"{where} shed: queues can only be late for ttft or total")
    return msgspec.convert({"slo": Slo(**times), **values}, SloClass, from_attributes=True)  # type: ignore[arg-type]
