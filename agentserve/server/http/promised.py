"""What a request says of the promise that its turn is to have: the field `slo`, or a header for clients
that can add no fields. Every dialect's comes here; `slo_classes.py` says what it comes to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from msgspec.structs import replace
from starlette.datastructures import Headers

from agentserve.server.errors import ApiError
from agentserve.server.http.context import ServerContext
from agentserve.server.http.schemas import SloFields
from agentserve.slo_classes import KINDS, Asked, BadPromise, Promise

HEADER = "x-slo"
_MOST_CHARS = 512
_YES_NO = {"true": True, "1": True, "false": False, "0": False}

SaidSlo = str | SloFields | None


class Says(Protocol):
    """A request's fields."""

    slo: SaidSlo
    service_tier: str | None


def promise_of(context: ServerContext, tenant: str, fields: Says) -> Promise:
    """What a turn of this request is promised. ApiError where it asks for what it cannot have."""
    said = _fields(fields.slo)
    asked = Asked(said.name, _times(said), said.shed, fields.service_tier)
    try:
        return context.promises.of(tenant, asked)
    except BadPromise as error:
        inside = error.part != "slo" and not isinstance(fields.slo, str)
        param = f"slo.{error.part}" if inside else "slo"
        told = str(error).removeprefix(f"{error.part}: ")
        raise ApiError(f"{param}: {told}", param=param, code="invalid_slo") from None


def said_in(headers: Headers | Mapping[str, str], body: SaidSlo) -> SaidSlo:
    """What a request says: its body, or, where that names neither class nor times, its header. ApiError."""
    said = _fields(body)
    raw = headers.get(HEADER)
    if raw is None or said.name is not None or _times(said):
        return body
    heard = _read(raw)
    return heard if said.shed is None else replace(heard, shed=said.shed)


def patient(body: SaidSlo) -> SloFields:
    """For a model call in the middle of something that has begun: it is late rather than refused."""
    return replace(_fields(body), shed=False)


def _fields(said: SaidSlo) -> SloFields:
    if isinstance(said, SloFields):
        return said
    return SloFields(name=said)


def _times(said: SloFields) -> dict[str, float]:
    given = {kind: getattr(said, kind) for kind in KINDS}
    return {kind: value for kind, value in given.items() if value is not None}


def _read(raw: str) -> SloFields:
    """`NAME`, or pairs as in `class=NAME, ttft=2, tbt=0.1, shed=true`."""
    if len(raw) > _MOST_CHARS:
        raise _bad(f"at most {_MOST_CHARS} characters")
    if "=" not in raw:
        return SloFields(name=raw.strip())
    found: dict[str, str] = {}
    for pair in raw.split(","):
        name, _, value = (part.strip() for part in pair.partition("="))
        if name in found or name not in ("class", "shed", *KINDS):
            raise _bad(f"{name[:40]!r} is none of class, shed, {', '.join(KINDS)}, each once")
        found[name] = value
    shed = found.get("shed")
    if shed is not None and shed not in _YES_NO:
        raise _bad("shed is true or false")
    times: dict[str, float] = {}
    for kind in KINDS:
        if kind in found:
            try:
                times[kind] = float(found[kind])
            except ValueError:
                raise _bad(f"{kind} is a number of seconds") from None
    return SloFields(name=found.get("class"), shed=None if shed is None else _YES_NO[shed], **times)


def _bad(reason: str) -> ApiError:
    return ApiError(f"X-SLO: {reason}", param="X-SLO", code="invalid_slo")
