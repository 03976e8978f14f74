"""The file of a cost model, which scheduler, tier policy and simulator read: JSON.

It says whose steps it is of, what was fitted, and how well that held on steps held out. A digest over all of
it finds what was damaged: a coefficient with another digit would be believed else.
"""

from __future__ import annotations

import hashlib

import msgspec

from agentserve.core.cost import StepCost
from agentserve.core.timing.fingerprint import Fingerprint
from agentserve.core.timing.fitting import Quality

FORMAT = "agentserve step cost"
VERSION = 1
MOST = 1e30  # of any coefficient: what a step comes to by the model stays a number, and is never infinite
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # the last: nested too deep


class CostFileError(ValueError):
    """The file is no cost model that can be used here; one line."""


class SavedCost(msgspec.Struct, frozen=True, kw_only=True):
    fingerprint: Fingerprint
    cost: StepCost
    steps: int  # that it was made from
    held_out: Quality


class _File(msgspec.Struct, frozen=True, kw_only=True):
    format: str
    version: int
    digest: str
    body: msgspec.Raw


class _Head(msgspec.Struct, frozen=True):
    format: str = ""
    version: int = 0


def encode_saved(saved: SavedCost) -> bytes:
    body = msgspec.json.encode(saved)
    file = _File(format=FORMAT, version=VERSION, digest=_digest(body), body=msgspec.Raw(body))
    return msgspec.json.format(msgspec.json.encode(file), indent=1) + b"\n"


def decode_saved(data: bytes) -> SavedCost:
    """Raises CostFileError."""
    try:
        head = msgspec.json.decode(data, type=_Head)
    except _UNREADABLE as error:
        raise CostFileError(f"not a cost model: {error}") from None
    if head.format != FORMAT:
        raise CostFileError("not a cost model: `agentserve fit` writes them")
    if head.version != VERSION:
        raise CostFileError(f"a cost model of version {head.version}; this is version {VERSION}")
    try:
        file = msgspec.json.decode(data, type=_File)
        saved = msgspec.json.decode(file.body, type=SavedCost)
    except _UNREADABLE as error:
        raise CostFileError(f"the cost model is damaged: {error}") from None
    if _digest(bytes(file.body)) != file.digest:
        raise CostFileError("the cost model is damaged: it does not agree with its digest")
    if max(*msgspec.structs.astuple(saved.cost)[2:], *saved.cost.slopes) > MOST:
        raise CostFileError(f"the cost model is damaged: a coefficient is above {MOST:g}")
    return saved


def checked(saved: SavedCost, here: Fingerprint) -> StepCost:
    """Its model. Raises CostFileError if it is of another machine, model or setting than `here`."""
    differ = saved.fingerprint.differences(here)
    if differ:
        raise CostFileError(f"the cost model is not of this machine and model: {'; '.join(differ)}")
    return saved.cost


def _digest(body: bytes) -> str:
    """Of a document, however it is indented."""
    return hashlib.sha256(msgspec.json.format(body, indent=-1)).hexdigest()
