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


def listing(sessions: Sequence[Session], now: float) -> Table:
    """One row per session, as the server sent them. `now`: Unix time."""
    table = Table(box=None, pad_edge=False)
    for name in ("session", "state", "turns", "tokens", "age", "KV is", "asked again", "price", "decision"):
        right = name in ("turns", "tokens", "age", "asked again", "price")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for session in sessions:
        state = plain(session.get("state", "?"))
        decision = session.get("decision") or {}
        table.add_row(
            Text(plain(session.get("id", "?"), 40)),
            Text(state, COLOURS.get(state, "white")),
            str(session.get("turns", 0)),
            str(session.get("tokens", 0)),
            ago(now - float(session.get("last_active_at", now))),
            Text(place(session.get("residency"))),
            _until(decision, now),
            _price(decision),
            Text(_decision(decision)),
        )
    return table


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
    if hints:
        yield Text(
            "client says: " + ", ".join(f"{plain(name)} {plain(value)}" for name, value in hints.items())
        )
    if session.get("devalued"):
        yield Text(f"nobody is expected back: {plain(session['devalued'])}", "yellow")


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
    outstanding = session.get("pending_tool_calls") or []
    if outstanding:
        yield Text("    waits for " + ", ".join(plain(call.get("name", "?")) for call in outstanding))


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
