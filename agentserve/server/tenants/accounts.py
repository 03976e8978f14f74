"""What each tenant has used of its limits: asked before any work is done, told what the work was.

Kept for tenants that are doing something: who is at rest, with full buckets, is as if never seen. No
event loop, no HTTP; the clock is passed in.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from agentserve.messages import TurnEnded
from agentserve.server.sessions.room import Quota
from agentserve.server.tenants.buckets import Bucket
from agentserve.server.tenants.terms import LimitsOf
from agentserve.tenant_limits import TenantLimits
from agentserve.tenant_metrics import PromiseTally
from agentserve.types import FinishReason

LATER = 60.0  # seconds after which to ask again where the tenant itself has to do something
SOON = 1.0  # seconds after which to ask again where nobody knows when a turn ends
_SWEEP = 1024  # accounts; with more of them those at rest are looked for now and then


class OverLimit(Exception):
    """A tenant asks for more than it may have now. The text is one line for it."""

    def __init__(self, limit: str, reason: str, wait: float) -> None:
        self.limit = limit
        self.wait = max(1, math.ceil(wait))  # seconds
        super().__init__(f"{reason} Please try again in {self.wait} s.")


def quotas(config: LimitsOf) -> Callable[[str], Quota]:
    """What each tenant's sessions may take, as the directory asks for it."""

    def of(tenant: str) -> Quota:
        limits = config.of(tenant)
        return Quota(limits.sessions, limits.stored_bytes)

    return of


@dataclass(frozen=True, slots=True)
class Standing:
    """How a tenant stands with one of its rates."""

    of: str  # requests, tokens
    limit: int
    remaining: int
    reset: float  # seconds until all of it is there again


@dataclass(slots=True)
class _Account:
    limits: TenantLimits
    requests: Bucket | None
    tokens: Bucket | None
    turns: int = 0  # running now

    def at_rest(self, now: float) -> bool:
        buckets = (self.requests, self.tokens)
        return not self.turns and all(b is None or b.full_in(now) == 0 for b in buckets)


@dataclass(slots=True)
class Tally:
    """What a tenant has done since the server started."""

    requests: int = 0
    refused: int = 0  # of them, by its limits
    turns: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    kept: dict[str, int] = field(default_factory=dict)  # promises, by kind
    missed: dict[str, int] = field(default_factory=dict)
    relegated: int = 0  # turns that could not be in time, and went behind those that could
    shed: int = 0  # turns that were not begun, as the queue was too long


@dataclass(slots=True)
class Accounts:
    config: LimitsOf
    now: Callable[[], float]
    _kept: dict[str, _Account] = field(default_factory=dict)
    _next_sweep: int = _SWEEP
    tallies: dict[str, Tally] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._kept)

    def counts(self) -> dict[str, tuple[int, ...]]:
        """What each tenant has done: requests, refusals, turns, tokens of prompts and of answers."""
        return {
            tenant: (t.requests, t.refused, t.turns, t.prompt_tokens, t.generated_tokens)
            for tenant, t in self.tallies.items()
        }

    def promises(self) -> dict[str, PromiseTally]:
        """What became of each tenant's promises."""
        return {
            tenant: PromiseTally(t.kept, t.missed, t.relegated, t.shed) for tenant, t in self.tallies.items()
        }

    def limits(self, tenant: str) -> TenantLimits:
        return self.config.of(tenant)

    def request(self, tenant: str) -> None:
        """One more request. OverLimit: it is refused, and costs nothing."""
        account, now = self._of(tenant), self.now()
        self._tally(tenant).requests += 1
        bucket = account.requests
        if bucket is not None:
            if wait := bucket.wait(1, now):
                self._tally(tenant).refused += 1
                raise OverLimit(
                    "requests", f"Rate limit reached: {bucket.per_minute} requests per minute.", wait
                )
            bucket.take(1, now)

    def check_turn(self, tenant: str) -> None:
        """Whether a turn may begin now. OverLimit."""
        account, now = self._of(tenant), self.now()
        tokens = account.tokens
        if tokens is not None and (wait := tokens.wait(1, now)):
            self._tally(tenant).refused += 1
            raise OverLimit("tokens", f"Rate limit reached: {tokens.per_minute} tokens per minute.", wait)
        self._check_room(tenant, account, 1)

    def check_stored(self, tenant: str, size: int) -> None:
        """Whether a tenant of whom so many bytes are kept may have more kept. OverLimit."""
        most = self.limits(tenant).stored_bytes
        if most is not None and size >= most:
            self._tally(tenant).refused += 1
            reason = f"{size} bytes are stored, of {most} at most: delete some, or store nothing."
            raise OverLimit("stored_bytes", reason, LATER)

    def begin(self, tenant: str, turns: int) -> None:
        """So many turns begin, all or none. OverLimit."""
        account = self._of(tenant)
        self._check_room(tenant, account, turns)
        account.turns += turns

    def end(self, tenant: str, turns: int) -> None:
        """As many as were begun are over."""
        self._of(tenant).turns -= turns

    def spent(self, tenant: str, prompt: int, generated: int) -> None:
        """Tokens of a turn: of its prompt when it is computed, of its answer at its end."""
        tally = self._tally(tenant)
        tally.turns += bool(prompt)
        tally.prompt_tokens += prompt
        tally.generated_tokens += generated
        tokens = self._of(tenant).tokens
        if tokens is not None:
            tokens.take(prompt + generated, self.now())

    def judged(self, tenant: str, prompt: int, ended: TurnEnded) -> None:
        """A turn is over: which of its promises were kept. One that was shed was not begun: its prompt costs
        nothing after all."""
        tally = self._tally(tenant)
        usage = ended.usage
        for kind in usage.kept:
            tally.kept[kind] = tally.kept.get(kind, 0) + 1
        for kind in usage.missed:
            tally.missed[kind] = tally.missed.get(kind, 0) + 1
        tally.relegated += usage.relegated
        if ended.reason is FinishReason.SHED:
            tally.shed += 1
            tally.turns -= 1
            tally.prompt_tokens -= prompt
            tokens = self._of(tenant).tokens
            if tokens is not None:
                tokens.take(-prompt, self.now())

    def standings(self, tenant: str) -> list[Standing]:
        """Of the rates that are limited."""
        account, now = self._of(tenant), self.now()
        named = (("requests", account.requests), ("tokens", account.tokens))
        return [
            Standing(of, bucket.per_minute, max(math.floor(bucket.level(now)), 0), bucket.full_in(now))
            for of, bucket in named
            if bucket is not None
        ]

    def _check_room(self, tenant: str, account: _Account, turns: int) -> None:
        most = account.limits.concurrent_turns
        if most is not None and account.turns + turns > most:
            self._tally(tenant).refused += 1
            running = f"{account.turns} are running, {turns} more were asked for."
            raise OverLimit("turns", f"At most {most} turns may run at once; {running}", SOON)

    def _tally(self, tenant: str) -> Tally:
        return self.tallies.setdefault(tenant, Tally())

    def _of(self, tenant: str) -> _Account:
        account, limits = self._kept.get(tenant), self.config.of(tenant)
        if account is None:
            self._sweep()
            account = self._kept[tenant] = _Account(limits, self._bucket(limits.requests_per_minute), None)
            account.tokens = self._bucket(limits.tokens_per_minute)
        elif account.limits != limits:  # an admin has said otherwise
            account.requests = self._bucket(limits.requests_per_minute, account.requests)
            account.tokens = self._bucket(limits.tokens_per_minute, account.tokens)
            account.limits = limits
        return account

    def _bucket(self, per_minute: int | None, before: Bucket | None = None) -> Bucket | None:
        """What was spent `before` stays spent, and what is added is there at once. A lower limit makes no
        debts of what was within the old one."""
        if per_minute is None:
            return None
        now = self.now()
        bucket = Bucket(per_minute, now)
        if before is not None:
            level = before.level(now)
            spent = before.per_minute - level
            bucket.take(min(spent, per_minute - min(level, 0.0)), now)
        return bucket

    def _sweep(self) -> None:
        """Forget those at rest, often enough that they are at most half of all."""
        if len(self._kept) >= self._next_sweep:
            now = self.now()
            self._kept = {name: a for name, a in self._kept.items() if not a.at_rest(now)}
            self._next_sweep = max(_SWEEP, 2 * len(self._kept))
