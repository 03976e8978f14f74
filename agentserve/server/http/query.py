"""Parameters of a query, read strictly: what cannot be meant is a 400 that names it, never a default."""

from __future__ import annotations

from starlette.requests import Request

from agentserve.server.errors import ApiError

MOST_DIGITS = 18  # a whole number of so many fits into 64 bits
_FLAGS = {"true": True, "1": True, "false": False, "0": False}


def text(request: Request, name: str) -> str | None:
    """Its value; None where it is not given. One that is given twice has none."""
    given = request.query_params.getlist(name)
    if len(given) > 1:
        raise ApiError(f"{name}: given {len(given)} times", param=name, code="invalid_value")
    return given[0] if given else None


def flag(request: Request, name: str) -> bool:
    """False where it is not given."""
    given = text(request, name)
    if given is None:
        return False
    if given not in _FLAGS:
        raise ApiError(f"{name}: must be true, false, 1 or 0", param=name, code="invalid_value")
    return _FLAGS[given]


def whole(request: Request, name: str) -> int | None:
    given = text(request, name)
    if given is None:
        return None
    if not (given.isascii() and given.isdecimal()) or len(given) > MOST_DIGITS:
        raise ApiError(f"{name}: must be a whole number", param=name, code="invalid_value")
    return int(given)
