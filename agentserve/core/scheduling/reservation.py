"""Admission by memory: what must be free before a turn may enter.

Three rules, from cautious to bold: the whole of what it could ever write (ORCA, OSDI 2022), what all
running turns will need at the worst moment (S-LoRA and LightLLM), the whole uncomputed input (the
scheduler's gate, as vLLM's default).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def orca_selection(reserved: int, slots: int, seats: int, turns: Iterable[int]) -> int:
    """How many of the turns that wait, in order of arrival, enter now.

    reserved: slots of the running turns; turns: slots that each would reserve, prompt and output. Nobody
    passes the first that does not fit. Objective: no turn that was admitted ever lacks memory.
    """
    entered = 0
    for needed in turns:
        if entered == seats or reserved + needed > slots:
            break
        reserved += needed
        entered += 1
    return entered


def peak_tokens(turns: Sequence[tuple[int, int]]) -> int:
    """The most slots that these turns hold at one time, each (slots used, tokens still to write), if every
    one writes all it may. Turns that end free theirs: the peak is just before one of the ends."""
    peak, used = 0, 0
    for place, (held, left) in enumerate(sorted(turns, key=lambda turn: -turn[1]), 1):
        used += held
        peak = max(peak, left * place + used)
    return peak
