"""Recorded traces: Mooncake's JSON lines, and a plain CSV.

Mooncake (FAST'25; one JSON object a line): `timestamp` in milliseconds, `input_length`, `output_length`, and
`hash_ids`, one for each block of 512 prompt tokens, the last of them cut. Equal ids stand for equal blocks
after equal beginnings, so a block's text follows from its id and shared prefixes stay shared.

CSV, with a header, any order of columns:

    arrival_s        seconds, ascending
    input_tokens     tokens that the request brings
    output_tokens    tokens that it generates
    tenant           optional
    session          optional: rows of one session follow each other in it, each adds to its context
    wait_s           optional: seconds between the end of the session's request before and this one;
                     a session's `arrival_s` counts in its first row
    prefix           optional: a name; requests with one name begin with the same text
    prefix_tokens    with `prefix`: how many of input_tokens that is
"""

from __future__ import annotations

import csv
import hashlib
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from agentserve.sim.experiment.script import Session, Trace, TraceError, Turn, at_unit_rate, checked, scaled
from agentserve.sim.traces.agents import Run

BLOCK = 512  # tokens that one of Mooncake's hash ids stands for
LONGEST = 10_000_000  # tokens of a request: anything above is a mistake in the file
NEEDED = ("arrival_s", "input_tokens", "output_tokens")
COLUMNS = (*NEEDED, "tenant", "session", "wait_s", "prefix", "prefix_tokens")
ALONE = "all"  # the tenant of who names none


class MooncakeRequest(msgspec.Struct, frozen=True):
    timestamp: int  # milliseconds
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def load(path: Path, *, scale: float = 1.0, weights: Mapping[str, float] | None = None) -> Trace:
    """A trace by its file's ending: .jsonl is Mooncake's, .csv ours. Raises TraceError or OSError."""
    if not 0 < scale <= 1:
        raise TraceError(f"scale: expected above 0 and at most 1, got {scale:g}")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TraceError(f"{path.name}: no UTF-8 text") from error
    match path.suffix:
        case ".jsonl":
            return mooncake(text, path.name, scale=scale)
        case ".csv":
            return table(text, path.name, scale=scale, weights=weights or {})
    raise TraceError(f"{path.name}: expected a name that ends in .jsonl (Mooncake) or .csv")


def mooncake(text: str, name: str, *, scale: float = 1.0) -> Trace:
    """Each line is a session of one turn. Raises TraceError, with the line's number."""
    asked: list[MooncakeRequest] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            request = msgspec.json.decode(line, type=MooncakeRequest)
        except msgspec.MsgspecError as error:
            raise TraceError(f"{name}, line {number}: {error}") from error
        _check_mooncake(request, f"{name}, line {number}")
        if asked and request.timestamp < asked[-1].timestamp:
            raise TraceError(f"{name}, line {number}: its timestamp is before that of the line before")
        asked.append(request)
    times, rate = at_unit_rate([request.timestamp / 1000 for request in asked])
    sessions = tuple(
        Session(f"r{number}", ALONE, at, (_mooncake_turn(request, str(number), scale),))
        for number, (request, at) in enumerate(zip(asked, times, strict=True))
    )
    return checked(Trace(name, sessions, {ALONE: 1.0}, scale, rate))


def _check_mooncake(request: MooncakeRequest, where: str) -> None:
    _length(request.input_length, f"{where}: input_length")
    _length(request.output_length, f"{where}: output_length")
    blocks = -(-request.input_length // BLOCK)
    if request.hash_ids and len(request.hash_ids) != blocks:
        raise TraceError(
            f"{where}: {len(request.hash_ids)} hash_ids, but {request.input_length} tokens are {blocks} "
            f"blocks of {BLOCK}"
        )


def _mooncake_turn(request: MooncakeRequest, own: str, scale: float) -> Turn:
    """own: names the text of a request that has no hash ids."""
    runs = []
    left = request.input_length
    if not request.hash_ids:
        return Turn((Run(_seed("line", own), scaled(left, scale)),), scaled(request.output_length, scale))
    for block in request.hash_ids:
        runs.append(Run(_seed("mooncake", str(block)), scaled(min(left, BLOCK), scale)))
        left -= BLOCK
    return Turn(tuple(runs), scaled(request.output_length, scale))


def table(text: str, name: str, *, scale: float = 1.0, weights: Mapping[str, float] = {}) -> Trace:
    """Raises TraceError, with the line's number. Tenants that `weights` does not name have weight 1."""
    rows = _rows(text, name)
    begun: dict[str, tuple[str, float, list[Turn]]] = {}
    last = -math.inf
    for number, row in rows:
        where = f"{name}, line {number}"
        cells = _Row(row, where, scale)
        session = row.get("session") or f"line {number}"
        turn, tenant = cells.turn(f"{session} {number}"), row.get("tenant") or ALONE
        if session not in begun:
            at = cells.number("arrival_s", 0.0)
            if at < last:
                raise TraceError(f"{where}: it arrives before the row before")
            last = at
            begun[session] = (tenant, at, [turn])
            continue
        owner, _, turns = begun[session]
        if row.get("tenant") and tenant != owner:
            raise TraceError(f"{where}: session {session} is of tenant {owner}, not of {tenant}")
        turns[-1] = msgspec.structs.replace(turns[-1], wait=cells.number("wait_s", 0.0))
        turns.append(turn)
    times, rate = at_unit_rate([at for _, at, _ in begun.values()])
    sessions = tuple(
        Session(session, tenant, time, tuple(turns))
        for (session, (tenant, _, turns)), time in zip(begun.items(), times, strict=True)
    )
    tenants = {session.tenant: weights.get(session.tenant, 1.0) for session in sessions}
    return checked(Trace(name, sessions, tenants, scale, rate))


def _rows(text: str, name: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Each row by column, with the number of the line that it ends in."""
    reader = csv.reader(io.StringIO(text), strict=True)
    try:
        header = next(reader, [])
        _check_header(header, name)
        for cells in reader:
            if not cells:
                continue
            if len(cells) != len(header):
                raise TraceError(
                    f"{name}, line {reader.line_num}: {len(cells)} cells, but the header has {len(header)}"
                )
            yield reader.line_num, dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise TraceError(f"{name}, line {reader.line_num}: {error}") from error


def _check_header(header: Sequence[str], name: str) -> None:
    lacking = [column for column in NEEDED if column not in header]
    if lacking:
        raise TraceError(f"{name}: its header lacks {', '.join(lacking)}")
    unknown = [column for column in header if column not in COLUMNS]
    if unknown:
        raise TraceError(f"{name}: unknown column {unknown[0][:32]!r}; there are: {', '.join(COLUMNS)}")
    if len(set(header)) != len(header):
        raise TraceError(f"{name}: a column stands twice in its header")


class _Row:
    """One row's cells, read."""

    def __init__(self, row: Mapping[str, str], where: str, scale: float) -> None:
        self._row = row
        self._where = where
        self._scale = scale

    def turn(self, own: str) -> Turn:
        """own: names the text that only this row has."""
        tokens, output = self._tokens("input_tokens"), self._tokens("output_tokens")
        prefix = self._row.get("prefix") or ""
        shared = self._tokens("prefix_tokens") if prefix else 0
        if shared > tokens:
            raise TraceError(f"{self._where}: prefix_tokens {shared} of only {tokens} input_tokens")
        runs = [Run(_seed("prefix", prefix), scaled(shared, self._scale))] if shared else []
        if tokens > shared:
            runs.append(Run(_seed("row", own), scaled(tokens - shared, self._scale)))
        return Turn(tuple(runs), scaled(output, self._scale))

    def number(self, column: str, least: float) -> float:
        text = self._row.get(column) or "0"
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value < math.inf:
            raise TraceError(
                f"{self._where}: {column}: expected a number of at least {least:g}, got {text!r}"
            )
        return value

    def _tokens(self, column: str) -> int:
        text = self._row.get(column) or ""
        if not text.isascii() or not text.isdigit() or len(text) > 18:
            raise TraceError(f"{self._where}: {column}: expected a whole number, got {text[:32]!r}")
        return _length(int(text), f"{self._where}: {column}")


def _length(tokens: int, what: str) -> int:
    if not 1 <= tokens <= LONGEST:
        raise TraceError(f"{what}: expected 1 to {LONGEST}, got {tokens}")
    return tokens


def _seed(*names: str) -> int:
    digest = hashlib.sha256("\0".join(names).encode()).digest()
    return int.from_bytes(digest[:6], "little")
