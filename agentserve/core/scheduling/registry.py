"""Policies by name. Each names the objective that it serves; baselines are here to be compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from agentserve.core.scheduling.levels import Feedback, LeastAttained
from agentserve.core.scheduling.orders import Keyed, ResumesFirst, by_deadline, urgency
from agentserve.core.scheduling.policy import Form, Order, Outlook, Reserve, SchedulingPolicy
from agentserve.core.scheduling.prefixes import HeaviestBranch, LongestPrefix
from agentserve.core.scheduling.relegation import Relegating
from agentserve.core.scheduling.settings import SchedulingConfig
from agentserve.core.scheduling.tenants import FairShares, OwnPlaces, Rounds

PATIENCE = 4.0  # seconds for which others may pass a turn that came before
EXAMINED = 128  # turns in line that are put in order, from the first on
SHORT_EXAMINED = 16  # of these, how many may turn out to be short
PREFIX_WORTH = 0.001  # seconds that a cached token counts as having come earlier
SHORTNESS = 1.0  # seconds that a turn is due later per second that its prefill takes


@dataclass(frozen=True, slots=True)
class Making:
    """What an order is made with."""

    outlook: Outlook
    settings: SchedulingConfig
    step: int  # tokens of a step

    def resumes_first(self) -> ResumesFirst:
        return ResumesFirst(
            self.outlook, self.step, patience=PATIENCE, examined=EXAMINED, tried=SHORT_EXAMINED
        )


@dataclass(frozen=True, slots=True)
class Entry:
    objective: str
    form: Form
    order: Callable[[Making], Order]


def by_urgency() -> Keyed:
    """Within a tenant."""
    return Keyed(urgency)


_POLICIES: dict[str, Entry] = {
    "fcfs": Entry(
        "fairness by time of arrival alone: whole prompts, before decodes",
        Form(chunked=False, decodes_ride=False),
        lambda _: OwnPlaces(Keyed()),
    ),
    "orca": Entry(
        "no turn that was admitted ever lacks memory: room for prompt and output is reserved",
        Form(chunked=False, reserve=Reserve.OUTPUT),
        lambda _: OwnPlaces(Keyed()),
    ),
    "decode-first": Entry(
        "no step without its decodes: whole prompts run beside them",
        Form(chunked=False),
        lambda _: OwnPlaces(Keyed()),
    ),
    "chunked": Entry(
        "a bounded time between tokens: prompts are cut to what a step has left (Sarathi-Serve)",
        Form(),
        lambda _: OwnPlaces(Keyed()),
    ),
    "prefix-aware": Entry(
        "each shared prefix is computed once: the longest match first, bounded by age",
        Form(),
        lambda m: OwnPlaces(LongestPrefix(m.outlook, per_token=PREFIX_WORTH, most=PATIENCE)),
    ),
    "prefix-branches": Entry(
        "each shared prefix is computed once: the branch that most wait under first, bounded by age",
        Form(),
        lambda _: OwnPlaces(HeaviestBranch(patience=PATIENCE)),
    ),
    "feedback": Entry(
        "short mean completion times, lengths unknown: skip-join feedback queues (FastServe)",
        Form(displaces=True),
        lambda m: OwnPlaces(Feedback(m.outlook, m.settings.feedback)),
    ),
    "programs": Entry(
        "short mean completion times of programs: least attained service first (Autellix)",
        Form(displaces=True),
        lambda m: OwnPlaces(LeastAttained(m.settings.feedback)),
    ),
    "deadline": Entry(
        "as many turns as possible that keep their promises: earliest deadline, shorter first (QoServe)",
        Form(keeps_deadlines=True, victims_by_price=True),
        lambda m: OwnPlaces(Relegating(lambda: Keyed(by_deadline(m.outlook, SHORTNESS)))),
    ),
    "rounds": Entry(
        "equal shares of tenants at constant cost: deficit round robin",
        Form(shares=True, victims_by_price=True),
        lambda m: Rounds(m.outlook, by_urgency, quantum=m.settings.quantum, weight=m.settings.weight),
    ),
    "virtual-tokens": Entry(
        "weighted shares of tenants that wait: the least served first (VTC)",
        Form(shares=True, victims_by_price=True),
        lambda m: FairShares(
            m.outlook, by_urgency, weight=m.settings.weight, memory=m.settings.memory_charge
        ),
    ),
    "fair-resumes": Entry(
        "turns that keep their promises, fairly: tenants by weighted share; in one, agents that come back "
        "from a tool before new prompts; chunks cut to the slack of decodes",
        Form(short_first=True, keeps_deadlines=True, shares=True, victims_by_price=True),
        lambda m: FairShares(
            m.outlook,
            lambda: Relegating(m.resumes_first),
            weight=m.settings.weight,
            memory=m.settings.memory_charge,
        ),
    ),
}


def policy_names() -> tuple[str, ...]:
    return tuple(_POLICIES)


def objective_of(name: str) -> str:
    return _POLICIES[name].objective


def check_policy(name: str) -> None:
    """ValueError if there is no policy of that name."""
    if name not in _POLICIES:
        raise ValueError(f'no scheduling policy "{name[:80]}"; known: {", ".join(_POLICIES)}')


def make_policy(settings: SchedulingConfig, step: int, outlook: Outlook) -> SchedulingPolicy:
    """step: tokens of a step. Raises ValueError if there is no policy of that name."""
    check_policy(settings.policy)
    entry = _POLICIES[settings.policy]
    order = entry.order(Making(outlook, settings, step))
    return SchedulingPolicy(settings.policy, entry.objective, entry.form, order)
