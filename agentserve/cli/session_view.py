"""Sessions drawn in the terminal: what an operator asks of them, from the server's JSON.

Names and reasons come from clients and models: they are shown as plain text, without control signs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from agentserve.cli.timeline import COLOURS, timeline

Session = Mapping[str, Any]

PLACES = {"device": ("█", "green"), "host": ("▓", "yellow"), "disk": ("▒", "blue"), "gone": ("░", "red")}
BAR = 40  # columns
WIDE = 120  # columns of a terminal in which a list has room for everything
GAP, LEAST = 2, 12  # columns between those of a list, and of its last one
NUMBERS = ("turns", "tokens", "last turn", "next look", "costs s/s")


def plain(value: object, longest: int = 60) -> str:
    """A text that came from elsewhere, fit for a terminal."""
    shown = "".join(sign if sign.isprintable() else "?" for sign in str(value)[: longest + 1])
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"


def ago(seconds: float) -> str:
    """A span for people: "0.3 s", "12 s", "4 min", "3 h", "2 d"."""
    seconds = max(0.0, seconds)
    if seconds < 10:
        return f"{seconds:.1f} s"
    for size, unit, limit in ((1, "s", 120), (60, "min", 7200), (3600, "h", 172800)):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


def listing(sessions: Sequence[Session], now: float, width: int = WIDE) -> Table:
    """One row per session, the last active first. `now`: Unix time. `width`: columns of the terminal."""
    table = Table(box=None, pad_edge=False)
    names = ["session", "state", "turns", "tokens", "last turn", "KV is", "decision"]
    if width >= WIDE:
        names[5:6] = ["waits for", "KV is", "next look", "costs s/s"]
    rows = [
        _cells(session, now)
        for session in sorted(sessions, key=lambda each: -float(each.get("last_active_at", now)))
    ]
    taken = sum(max(len(name), *(len(row[name]) for row in rows)) + GAP for name in names[:-1] if rows)
    for name in names:
        fold = name in ("session", "KV is")
        table.add_column(
            name,
            justify="right" if name in NUMBERS else "left",
            overflow="fold" if fold else "ellipsis",
            no_wrap=not fold,
            max_width=max(LEAST, width - taken) if name == "decision" else None,
        )
    for row in rows:
        table.add_row(*(row[name] for name in names))
    return table


def _cells(session: Session, now: float) -> dict[str, Text]:
    state = plain(session.get("state", "?"))
    decision = session.get("decision") or {}
    waits_for = ", ".join(dict.fromkeys(map(plain, session.get("waiting_for") or ())))
    return {
        "session": Text(plain(session.get("id", "?"), 128)),
        "state": Text(state, COLOURS.get(state, "white")),
        "turns": Text(str(session.get("turns", 0))),
        "tokens": Text(str(session.get("tokens", 0))),
        "last turn": Text(ago(now - float(session.get("last_active_at", now)))),
        "waits for": Text(plain(waits_for, 24) if state == "WAITING_TOOL" else ""),
        "KV is": Text(place(session.get("residency")) + _old(session, now)),
        "next look": Text(_until(decision, now)),
        "costs s/s": Text(_price(decision)),
        "decision": Text(_decision(decision)),
    }


def _old(session: Session, now: float) -> str:
    """That it is not known how it is now: its worker does not answer."""
    if not session.get("old"):
        return ""
    as_of = session.get("as_of")
    return " (worker silent)" if as_of is None else f" ({ago(now - float(as_of))} ago)"


def place(residency: Mapping[str, Any] | None) -> str:
    """Blocks by place: "device 3, host 9"; empty where there are no tiers."""
    if not residency:
        return ""
    found = [f"{name} {residency[name]}" for name in PLACES if residency.get(name)]
    return ", ".join(found) or "nowhere"


def _until(decision: Mapping[str, Any], now: float) -> str:
    until = decision.get("until")
    return f"in {ago(float(until) - now)}" if until is not None else ""


def _price(decision: Mapping[str, Any]) -> str:
    price = decision.get("price")
    return f"{float(price):.3g}" if price is not None else "?" if decision else ""


def _decision(decision: Mapping[str, Any]) -> str:
    if not decision:
        return ""
    return f"{plain(decision.get('choice', ''))}: {plain(decision.get('reason', ''))}"


def story(session: Session, now: float) -> Iterator[RenderableType]:
    """One session from top to bottom: what it is, its states over time, its waits, where its KV is."""
    state = plain(session.get("state", "?"))
    head = Text(plain(session.get("id", "?"), 100), "bold")
    head.append(f"  {state}", COLOURS.get(state, "white"))
    yield head
    parent = f", copied from {plain(session['parent'])}" if session.get("parent") else ""
    yield Text(
        f"{session.get('turns', 0)} turns, {session.get('messages', 0)} messages, "
        f"{session.get('tokens', 0)} tokens, epoch {session.get('epoch', 0)}{parent}; "
        f"last active {ago(now - float(session.get('last_active_at', now)))} ago"
    )
    yield from _said(session, now)
    history = session.get("history") or []
    if history:
        yield Text()
        made = [
            {**each, "choice": plain(each.get("choice", "")), "reason": plain(each.get("reason", ""))}
            for each in session.get("decisions") or []
        ]
        yield timeline([{**step, "state": plain(step["state"])} for step in history], now, made)
    waited = waits(history, now)
    if waited:
        yield Text()
        yield _waits_table(waited)
    yield Text()
    yield from _places(session, now)


def _said(session: Session, now: float) -> Iterator[RenderableType]:
    """What its client said that still holds, and why nobody is expected back."""
    hints = {name: value for name, value in (session.get("hints") or {}).items() if value}
    if hints.get("deadline"):
        hints["deadline"] = f"in {ago(float(hints['deadline']) - now)}"
    if hints.get("expected_wait"):
        hints["expected_wait"] = ago(float(hints["expected_wait"]))
    if isinstance(hints.get("retain"), list):
        hints["retain"] = "tokens " + ", ".join(map(_span, hints["retain"]))
    if hints:
        yield Text(
            "client says: " + ", ".join(f"{plain(name)} {plain(value, 300)}" for name, value in hints.items())
        )
    if session.get("devalued"):
        yield Text(f"nobody is expected back: {plain(session['devalued'])}", "yellow")


def _span(span: Mapping[str, Any]) -> str:
    end = span.get("end")
    return f"{span.get('start', 0)}-{'' if end is None else end}: {span.get('priority', '?')}"


def waits(history: Sequence[Mapping[str, Any]], now: float) -> dict[str, list[float]]:
    """Seconds of each wait by tool, oldest first; one that goes on lasts until `now`.

    Calls of one turn are waited for together: each of their tools has that wait.
    """
    found: dict[str, list[float]] = {}
    for number, step in enumerate(history):
        if step.get("state") != "WAITING_TOOL":
            continue
        end = float(history[number + 1]["at"]) if number + 1 < len(history) else now
        for tool in dict.fromkeys(step.get("tools") or ("?",)):
            found.setdefault(plain(tool), []).append(max(0.0, end - float(step["at"])))
    return found


def _waits_table(waited: Mapping[str, Sequence[float]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("waited for")
    for name in ("times", "median", "longest", "last"):
        table.add_column(name, justify="right")
    for tool, seconds in sorted(waited.items(), key=lambda item: -sum(item[1])):
        spans = (median(seconds), max(seconds), seconds[-1])
        table.add_row(Text(tool), str(len(seconds)), *map(ago, spans))
    return table


def _places(session: Session, now: float) -> Iterator[RenderableType]:
    outstanding = session.get("pending_tool_calls") or []
    if outstanding:
        told = (
            f"{plain(call.get('name', '?'))} ({plain(call.get('id', '?'))}"
            f"{', its result is here' if call.get('result_taken') else ''})"
            for call in outstanding
        )
        yield Text("waits for " + ", ".join(told))
    if session.get("old"):
        as_of = session.get("as_of")
        when = "never said how it is" if as_of is None else f"said this {ago(now - float(as_of))} ago"
        yield Text(f"its worker does not answer; it {when}", "yellow")
    residency = session.get("residency")
    if not residency:
        yield Text(f"KV: {session.get('pages', 0)} pages on the device; no tiers below it are known of")
        return
    yield Text("KV: ").append_text(bar(residency)).append(f"  {place(residency)}")
    if residency.get("copied"):
        yield Text(f"    {residency['copied']} of the blocks on the device have a copy below")
    decision = session.get("decision")
    if decision:
        again = _until(decision, now)
        yield Text(
            f"    decided: {_decision(decision)} (costs {_price(decision)} s per second"
            f"{'; looked at again ' + again if again else ''})"
        )
    yield from _decisions(session.get("decisions") or [], session)


def _decisions(made: Sequence[Mapping[str, Any]], session: Session) -> Iterator[RenderableType]:
    """What was decided when, on the timeline's clock, and where the blocks were at that moment."""
    if not made:
        return
    history = session.get("history") or made
    table = Table(box=None, pad_edge=False)
    for name in ("at", "decided", "because", "blocks were"):
        table.add_column(name, justify="right" if name == "at" else "left", overflow="fold")
    for each in made:
        table.add_row(
            f"{float(each['at']) - float(history[0]['at']):.3f} s",
            Text(plain(each.get("choice", ""))),
            Text(plain(each.get("reason", ""))),
            bar(each.get("residency") or {}, BAR // 2).append(f" {place(each.get('residency'))}"),
        )
    yield Text()
    yield table


def bar(residency: Mapping[str, Any], columns: int = BAR) -> Text:
    """Blocks by place, from the fastest to those that would be computed again."""
    total = sum(int(residency.get(name, 0)) for name in PLACES)
    shown, before = Text(), 0
    for name, (sign, colour) in PLACES.items():
        count = int(residency.get(name, 0))
        if count and total:
            left, right = (round(n * columns / total) for n in (before, before + count))
            shown.append(sign * max(1, right - left), colour)
        before += count
    return shown
