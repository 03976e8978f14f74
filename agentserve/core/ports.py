"""What the core needs from outside, as the wiring rooms see it."""

from __future__ import annotations

from typing import Protocol

from agentserve.core.plan import Plan, StepResult


class Executor(Protocol):
    """Runs plans. One real implementation (torch), one simulated; neither knows the scheduler."""

    def run(self, plan: Plan) -> StepResult:
        """Run one plan; blocks until its tokens are sampled.

        A chunk that cannot be run is reported in its `ChunkResult.error`; an exception means that
        the whole step failed.
        """
        ...

    def define_grammar(self, grammar_id: str, compiled: str) -> None:
        """Make a compiled grammar usable; a text that does not parse is a ValueError."""
        ...

    def drop_grammar(self, grammar_id: str) -> None: ...
