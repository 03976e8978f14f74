"""The tiers inside the core: telling the policy what happens, asking it, and doing what it says.

One object stands between the engine and everything below the device. It keeps the ledger of
sessions, asks the policy about those at rest, and hands what was decided to `Spills` and `Restores`.
Nothing here can make a session wrong, or wait for longer than computing would take.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from agentserve.core.devalue import Devaluation
from agentserve.core.kv import KVManager
from agentserve.core.ledger import Known, Stage
from agentserve.core.market import Queues, TierParts, Valuation
from agentserve.core.news import DecisionNews
from agentserve.core.pressure import Verdict
from agentserve.core.probe import Probes
from agentserve.core.quotes import TierQuotes
from agentserve.core.restore import Begun, Restores
from agentserve.core.session import Session
from agentserve.core.spill import Spills
from agentserve.core.timers import Timers
from agentserve.core.victims import Way
from agentserve.core.views import resting_view, tiers_view
from agentserve.messages import SessionView, TiersView
from agentserve.types import SessionId
from tiering.manager import TierManager
from tiering.policy.base import Choice, Decision, Departure, Hints, Rest, Signal, Watched
from tiering.types import Move, Tier, TransferDone

SETTLE = 0.05  # seconds after a turn's end in which the API process says what the end means
SOONEST = 0.01  # seconds until a decision is looked at again, at the earliest


class Tiers:
    def __init__(self, parts: TierParts, kv: KVManager, queues: Queues) -> None:
        setup = parts.setup
        self.setup = setup
        self.policy = parts.policy
        # Asked once: it takes longer than all the rest of a view.
        self._watched = parts.policy if isinstance(parts.policy, Watched) else None
        self.manager = TierManager(
            setup.host_slots, setup.disk_bytes, setup.block_bytes, setup.entries, staging=setup.staging
        )
        self.manager.health.note(setup.faults)
        if setup.disk_error:
            self.manager.health.absent(setup.disk_error)
        self._book = parts.book
        self._kv = kv
        self._queues = queues
        self._value = Valuation(parts, kv, self.manager, queues)
        self.ledger = self._value.ledger
        self.manager.ranking = self.ledger
        self.restores = Restores(kv, self.manager, self.ledger)
        self.spills = Spills(kv, self.manager, self.ledger)
        self.probes = Probes(kv, self.manager, self.ledger)
        self._marks = Devaluation(kv, self.ledger)
        kv.tree.queue.order = self._value.order
        self.news = DecisionNews()
        self._now = 0.0
        self._timers = Timers(self.ledger)
        self._hits = dict.fromkeys(Tier, 0)
        self._choices = dict.fromkeys(Choice, 0)
        self.returned = 0  # blocks brought for turns that had been preempted
        self.quotes = TierQuotes(kv, self.manager, self.ledger, parts.book.prices, peers=setup.peers)

    # --- what happens to sessions ----------------------------------------------------------

    def submitted(self, session: Session, now: float) -> None:
        """A turn has arrived. What it needs from below is ordered at once, if it costs nobody anything."""
        self._at(now)
        known = self.ledger.known.get(session.id)
        new = known is None
        if known is None:
            known = self.ledger.open(session.id, now)
        else:
            if not known.told:
                self._tell(known)
            self.policy.resumed(session.id, now, max(0.0, now - known.since))
        self.spills.stop(session.id)
        known.tenant = session.tenant
        self.ledger.rename(known, session.namespace, session.tokens)
        self._marks.value_again(known)
        known.stage, known.since, known.told = Stage.WAITING, now, False
        known.place = math.inf
        known.turn = session.last_turn
        self.restores.expect(session.id)
        self.restores.begin(known, self._book.prices(), now, self.room_without_loss, waits=True)
        if (new or session.generated) and self.setup.peers:  # generated: its turn was begun elsewhere
            self.probes.ask(known, self._book.prices(), now)
        self._value.sync()

    def admitted(self, session: Session, hit: int, now: float) -> None:
        self._at(now)
        known = self.ledger.known[session.id]
        if known.told:  # it was preempted: the policy thinks that it rests
            self.policy.resumed(session.id, now, 0.0)
        known.devalued = False
        known.stage, known.since, known.told, known.leaves = Stage.RUNNING, now, False, False
        self.probes.dismiss(session.id)
        self.spills.stop(session.id)
        brought, left = self.restores.dismiss(session.id), hit
        if session.running_turn.preemptions:
            self.returned += len(brought)
            return
        for tier in (Tier.HOST, Tier.DISK):
            tokens = min(left, brought.count(tier) * self._kv.page_size)
            self._hits[tier] += tokens
            left -= tokens
        self._hits[Tier.DEVICE] += left

    def preempted(self, session: Session, now: float, verdict: Verdict) -> Way:
        """It lost its seat and waits to go on: parked with the reason `pressure`. Returns the way it went."""
        self._at(now)
        known = self.ledger.known[session.id]
        known.stage, known.since, known.rest, known.tools = Stage.WAITING, now, Rest.PRESSURE, ()
        known.place = math.inf
        self._tell(known)
        self.spills.headroom = len(self._queues.running)
        if verdict.way is None:
            self._decide(known)
        else:
            self._carry_out(known, self._value.under_pressure(known, verdict))
        self.restores.expect(session.id)
        self._value.sync()
        return Way.SWAP if known.leaves else Way.RECOMPUTE

    def withdrawn(self, session: Session, now: float) -> None:
        """Another worker goes on with its turn, and reads what is on disk here: it stays somebody's."""
        self._at(now)
        known = self.ledger.known[session.id]
        self.probes.dismiss(session.id)
        self.restores.dismiss(session.id)
        self.spills.stop(session.id)
        known.stage, known.since = Stage.RESTING, now
        self._value.sync()

    def ended(self, session: Session, now: float) -> None:
        """Its turn is over, or it was forked off: what that means is said in a moment (`parked`)."""
        self._at(now)
        known = self.ledger.open(session.id, now)
        self.probes.dismiss(session.id)
        self.restores.dismiss(session.id)
        known.tenant = session.tenant
        self.ledger.rename(known, session.namespace, session.tokens)
        known.stage, known.since, known.told = Stage.RESTING, now, False
        known.rest, known.tools, known.turn = Rest.IDLE, (), session.last_turn
        self._timers.set(known, now + SETTLE)
        if self.policy.eager:
            self._copy_early(known, now)
        self._value.sync()

    def _copy_early(self, known: Known, now: float) -> None:
        """Copies into free host slots, before it is known what the turn's end means. Steps are long: by
        then others may have taken the pages."""
        free = self.manager.host_free
        if free and not self.manager.staging:
            residency = self._value.measure(known)
            if residency.device - residency.copied <= free:
                self.spills.begin(known, Choice.HOST, now, free_only=True)

    def parked(
        self, session: Session, now: float, tools: tuple[str, ...], hints: Hints, *, waiting: bool
    ) -> None:
        self._at(now)
        known = self.ledger.open(session.id, now)
        known.rest, known.tools = (Rest.TOOL if waiting else Rest.IDLE), tools
        self.ledger.hinted(known, hints)
        self._tell(known)
        self._decide(known)
        self._value.sync()

    def signalled(self, session: SessionId, signal: Signal, now: float, hints: Hints | None = None) -> None:
        """News of a session: a tool's, or (EXPECTED, with hints) its client's."""
        self._at(now)
        known = self.ledger.known.get(session)
        if known is None:
            return
        if hints is not None:
            self.ledger.hinted(known, hints)
        self.policy.signalled(session, signal, now, known.hints)
        if known.stage is Stage.RESTING and known.told:
            self._decide(known)
        self._value.sync()

    def departed(self, session: SessionId, why: Departure, now: float) -> None:
        """Nobody is likely to come back to its KV. A turn that waits still wants all of it; one that runs
        keeps its pages, and what it has below goes first. What its end means is said then, as always."""
        self._at(now)
        known = self.ledger.known.get(session)
        if known is None:
            return
        if known.stage is Stage.RESTING and not known.told:
            self._tell(known)
        self.policy.gone(session, now, why)
        if known.stage is not Stage.WAITING:
            self._give_up(known)
        if known.stage is Stage.RESTING:
            self._decide(known)
        self._value.sync()

    def closed(self, session: SessionId, now: float) -> None:
        self._at(now)
        known = self.ledger.known.get(session)
        if known is None:
            return
        self.policy.gone(session, now, Departure.FINISHED)
        self.probes.dismiss(session)
        self.restores.dismiss(session)
        self._give_up(known)
        self.ledger.forget(session)
        self._value.sync()

    # --- decisions -------------------------------------------------------------------------

    def _tell(self, known: Known) -> None:
        cached = self._kv.cached_tokens(known.namespace, known.tokens)
        self.policy.parked(self.ledger.park_of(known, cached))
        known.told = True

    def _decide(self, known: Known) -> None:
        known.timer = 0
        decision = self.policy.decide(known.id, self._value.measure(known), self._value.market())
        self._carry_out(known, decision)

    def _carry_out(self, known: Known, decision: Decision) -> None:
        if known.decided(decision, self._now):
            self.news.add(known, known.decisions[-1])
        self._choices[decision.choice] += 1
        if decision.choice is Choice.DROP:
            self._give_up(known)
        else:
            self._marks.revalue(known)
        match decision.choice:
            case Choice.HOST | Choice.DISK:
                self.spills.begin(known, decision.choice, self._now)
            case Choice.RESTORE:
                self.spills.stop(known.id)
                self.restores.begin(
                    known, self._book.prices(), self._now, self.room_without_loss, waits=False
                )
            case _:
                self.spills.stop(known.id)
        if math.isfinite(decision.until) and known.stage is Stage.RESTING:
            self._timers.set(known, max(decision.until, self._now + SOONEST))
        known.leaves = known.stage is Stage.WAITING and decision.choice in (Choice.HOST, Choice.DISK)
        self._value.changed()

    def _give_up(self, known: Known) -> None:
        """Nobody is expected back to it: what is moved for it alone is taken back."""
        self._marks.devalue(known)
        self.spills.stop(known.id)
        self.spills.abandon()
        self.restores.give_up(known.id)

    # --- time and transfers ----------------------------------------------------------------

    def begin(self, now: float) -> None:
        """A step begins: what idle blocks are worth may have changed."""
        self._at(now)
        self._kv.tree.queue.age()
        self.spills.headroom = len(self._queues.running)
        if self.spills.pressed:
            self.spills.go_on(now)
            self._value.sync()

    def stepped(self, sessions: Iterable[SessionId], seconds: float) -> None:
        """A step has run."""
        for session in sessions:
            known = self.ledger.known.get(session)
            if known is not None:
                known.service += seconds

    def finish(self, dones: Sequence[TransferDone], now: float) -> None:
        """Transfers have ended, one way or another. Unknown ones are ignored."""
        self._at(now)
        for done in dones:
            recalled = self.manager.flights.recalled(done.id)
            transfer = self.manager.finished(done, now)
            if transfer is None:
                continue
            ok = done.moved(len(transfer.blocks))
            if transfer.move in (Move.SAVE, Move.WRITE):
                self.spills.finished(transfer, ok, recalled=recalled)
            elif transfer.move is Move.PROBE:
                self.probes.finished(transfer)
            else:
                self.restores.finished(transfer, ok)
            if all(ok) and not done.cancelled:
                self._book.moved(transfer.move, len(ok), done.seconds)
        self.spills.go_on(now)
        self._value.sync()

    def tick(self, now: float) -> None:
        """Look again at decisions whose time has come; end waits that have lasted too long."""
        self._at(now)
        self.restores.expire(now)
        self.probes.expire(now)
        while (known := self._timers.take(now)) is not None:
            if not known.told:
                self._tell(known)
            self._decide(known)
        if self.spills.next_try is not None and self.spills.next_try <= now:
            self.spills.go_on(now)
        self._value.sync()

    def next_timer(self) -> float | None:
        """When `tick` or the next plan has something to look at; None: not before something happens."""
        times = (
            self._timers.next,
            self.restores.next_deadline,
            self.probes.next_deadline,
            self.spills.next_try,
        )
        return min((time for time in times if time is not None), default=None)

    def _at(self, now: float) -> None:
        self._now = now
        self._value.at(now)

    # --- what the scheduler asks -----------------------------------------------------------

    @property
    def room_without_loss(self) -> int:
        """Blocks to be had without losing anything, that nobody else counts on."""
        return self._value.room_without_loss(self.restores.promised)

    def holds_up(self, session: Session, room: int, now: float) -> str:
        """What keeps its turn from being admitted: "loading", while KV comes from below; "pages", while
        there is no room yet for what would come. Asked when it could be admitted: then what it lacks is
        ordered, whoever's idle KV that takes. To compute what lies below, only because the room for it
        is not free yet, would cost more than waiting for the running ones, and take the room of those
        behind it."""
        self._at(now)
        if self.probes.holds_up(session.id, now):
            return "loading"
        if self.manager.empty:
            return ""
        known = self.ledger.known[session.id]
        known.leaves = False  # from now on it is to come back
        if not self.restores.holds_up(session.id, now):
            waited = self.probes.waited(session.id, now)
            begun = self.restores.begin(known, self._book.prices(), now, room, waits=True, waited=waited)
            if begun is Begun.ORDERED:
                self._value.sync()
            elif begun is Begun.NO_ROOM and (self._queues.running or self.restores.under_way):
                return "pages"
        return "loading" if self.restores.holds_up(session.id, now) else ""

    def lacking(self, session: Session) -> int:
        """Tokens of a waiting session that have KV nowhere: what computing it takes once all is restored."""
        return self.restores.lacking(self.ledger.known[session.id])

    def ranked(self, waiting: Sequence[Session], now: float) -> list[Session]:
        """The order in which turns are admitted (`Valuation.ranked`)."""
        self._at(now)
        return self._value.ranked(waiting)

    def lined_up(self, waiting: Sequence[Session]) -> None:
        """The order in which turns will enter: what the last of them need goes before what the first need."""
        for place, session in enumerate(waiting):
            self.ledger.known[session.id].place = place

    # --- views -----------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget what is below, but for what a transfer needs now."""
        self.manager.clear()
        self._value.sync()

    def view(self) -> TiersView:
        """Figures for operators."""
        return tiers_view(
            self.policy, self.manager, self._kv, watched=self._watched, hits=self._hits, choices=self._choices
        )

    def describe(self, view: SessionView) -> SessionView:
        """A session's view with what the tiers know of it, if it is at rest."""
        known = self.ledger.known.get(view.session)
        if known is None or known.stage is not Stage.RESTING:
            return view
        return resting_view(view, known, self._value.measure(known))

    def check(self) -> None:
        """Raise AssertionError if an invariant of the tiers is broken."""
        self.manager.check()
        self.ledger.check()
        self._value.check()
        self.restores.check()
        self._marks.check()
        assert not self.manager.lost, "a lost copy was not passed on"
