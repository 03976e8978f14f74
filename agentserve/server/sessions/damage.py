"""What LMDB says of damage, and what is told of it."""

from __future__ import annotations

from dataclasses import dataclass

import lmdb

DAMAGE = (
    lmdb.InvalidError,
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.VersionMismatchError,
    lmdb.MapResizedError,  # nobody else writes here: the meta is wrong
    lmdb.PageFullError,
    lmdb.PanicError,
    lmdb.BadTxnError,
    lmdb.BadDbiError,
    lmdb.BadValsizeError,
    lmdb.CursorFullError,
    lmdb.IncompatibleError,
    lmdb.NotFoundError,
    lmdb.ProblemError,
)
"""Errors of LMDB that pages are the cause of, or that it gives until it is opened again."""


@dataclass(frozen=True, slots=True)
class Damage:
    """What was wrong with the file, once."""

    reason: str
    kept: str  # the name of the damaged file; empty: there was none to keep
    missing: int | None  # records that were written and could not be found; None: nobody can say

    def __str__(self) -> str:
        missing = "an unknown number of" if self.missing is None else str(self.missing)
        aside = f"; the damaged file is kept as {self.kept}" if self.kept else ""
        return f"{self.reason} ({missing} record(s) missing{aside})"


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
