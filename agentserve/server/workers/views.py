"""What workers say of themselves and of sessions, and what is known where one says nothing.

A worker answers between two steps. Whoever asks waits a moment for it, once: of one that owes an answer
since then what it told last is shown at once, as old.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from agentserve.clock import Clock
from agentserve.messages import Command, Describe, Description, SessionView
from agentserve.server.engine_port import FleetHealth, FleetView, SeenSession, Silence, TierReport
from agentserve.server.workers.questions import Questions
from agentserve.server.workers.slot import Slot
from agentserve.types import SessionId

ANSWER_SECONDS = 2.0
MOST_SEEN = 1000  # sessions of which it is known what was told last
SILENT_SHARE = 12  # one part in so many of the time after which a worker is killed: it is told as silent
LOST_SHARE = 4  # the same: it is not counted on


class Views:
    """The fleet's eyes. On one event loop."""

    def __init__(
        self,
        slots: Sequence[Slot],
        homes: Mapping[SessionId, int],
        clock: Clock,
        has_work: Callable[[Slot], bool],
        hang_seconds: float,
    ) -> None:
        self._slots = slots
        self._homes = homes
        self._clock = clock
        self._has_work = has_work
        self._hang_seconds = hang_seconds
        self._questions = Questions()
        self._seen: OrderedDict[SessionId, SeenSession] = OrderedDict()  # the last told last

    async def fleet(self, session: SessionId | None = None) -> FleetView:
        home = self._homes.get(session) if session is not None else None
        answers = await self.ask(
            [
                (slot, partial(Describe, session=session if slot.index == home else None))
                for slot in self._slots
                if slot.worker is not None
            ],
            ANSWER_SECONDS,
        )
        found = next((answer.session for answer in answers if answer and answer.session), None)
        views = {slot.index: view for slot in self._slots if (view := slot.view) is not None}
        now = self._clock.now()
        ages = {index: max(0.0, now - self._slots[index].heard_at) for index in views}
        return FleetView(tuple(views.values()), found, ages)

    async def sessions(self, names: Sequence[SessionId]) -> dict[SessionId, SeenSession]:
        """One question each, to its worker only, all at once."""
        asked = [name for name in names if name in self._homes]
        answers = await self.ask(
            [(self._slots[self._homes[name]], partial(Describe, session=name)) for name in asked],
            ANSWER_SECONDS,
        )
        found: dict[SessionId, SeenSession] = {}
        for name, answer in zip(asked, answers, strict=True):
            if answer is not None:
                if answer.session is not None:
                    found[name] = SeenSession(answer.session, self._clock.now())
            elif (known := self._seen.get(name)) is not None:
                found[name] = SeenSession(known.view, known.at, old=True)
            else:
                found[name] = SeenSession(None, None, old=True)
        return found

    async def ask(
        self, questions: Sequence[tuple[Slot, Callable[[int], Command]]], seconds: float
    ) -> list[Description | None]:
        """As `Questions.ask`; nobody waits for a worker that has not answered before."""
        now = self._clock.now()
        fit = [(slot, question) for slot, question in questions if not self._slow(slot, now)]
        for slot, _ in fit:
            self.owes(slot)
        answers = iter(await self._questions.ask(fit, seconds))
        willing = {id(slot) for slot, _ in fit}
        return [next(answers) if id(slot) in willing else None for slot, _ in questions]

    def answered(self, answer: Description) -> None:
        if (view := answer.session) is not None and view.session in self._homes:
            self._remember(view)
        self._questions.answered(answer)

    def abandon(self, slot: Slot, sessions: Sequence[SessionId]) -> None:
        """The worker in `slot` is gone, and so is what it knew of these."""
        self._questions.abandon(slot.index)
        for session in sessions:
            self.forget(session)

    def forget(self, session: SessionId) -> None:
        self._seen.pop(session, None)

    def tiers(self) -> tuple[TierReport, ...]:
        return tuple(
            TierReport(slot.index, view.tiers, slot.disk_failing_since)
            for slot in self._slots
            if (view := slot.last_view) is not None and view.tiers is not None
        )

    # --- silence --------------------------------------------------------------------------

    def owes(self, slot: Slot) -> None:
        """The worker is about to get something to answer or to do."""
        if not self._has_work(slot):
            slot.owed_at = self._clock.now()

    def health(self) -> FleetHealth:
        """As far as it is known now. Who has nothing to do is asked, so that the next to look may know."""
        now, silent = self._clock.now(), self.silent()
        lost = sum(now - silence.since >= self._hang_seconds / LOST_SHARE for silence in silent)
        alive = [slot for slot in self._slots if slot.worker is not None]
        for slot in alive:
            if not self._has_work(slot):
                self.owes(slot)
                self._questions.poke(slot)
        return FleetHealth(len(self._slots), len(alive) - lost, silent)

    def silent(self) -> tuple[Silence, ...]:
        now, longest = self._clock.now(), self._hang_seconds / SILENT_SHARE
        quiet = [(slot.index, self._silence(slot, now)) for slot in self._slots if slot.worker is not None]
        return tuple(Silence(index, now - seconds) for index, seconds in quiet if seconds >= longest)

    def _silence(self, slot: Slot, now: float) -> float:
        """Seconds for which it has had something to say and said nothing."""
        return now - max(slot.heard_at, slot.owed_at) if self._has_work(slot) else 0.0

    def _slow(self, slot: Slot, now: float) -> bool:
        return slot.unanswered and self._silence(slot, now) >= ANSWER_SECONDS

    def _remember(self, view: SessionView) -> None:
        self._seen[view.session] = SeenSession(view, self._clock.now())
        self._seen.move_to_end(view.session)
        if len(self._seen) > MOST_SEEN:
            self._seen.popitem(last=False)
