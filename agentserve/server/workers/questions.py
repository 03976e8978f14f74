"""Questions to workers and their answers: each is one command, answered by one `Description`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentserve.messages import Command, Describe, Description
from agentserve.server.workers.slot import Slot


@dataclass(frozen=True, slots=True)
class _Open:
    """A Describe or ResetPrefixCache that awaits its Description."""

    slot: int
    answer: asyncio.Future[Description | None]


class Questions:
    """All that were asked and are not answered yet. On one event loop."""

    def __init__(self) -> None:
        self._open: dict[int, _Open] = {}
        self._asked = 0

    async def ask(
        self, questions: Sequence[tuple[Slot, Callable[[int], Command]]], seconds: float
    ) -> list[Description | None]:
        """The answers, in order; None from a worker that is gone, dies, or takes longer than `seconds`.

        questions: whom to ask, and the command for a request number.
        """
        requests: list[int] = []
        answers: list[asyncio.Future[Description | None]] = []
        for slot, question in questions:
            self._asked += 1
            answer: asyncio.Future[Description | None] = asyncio.get_running_loop().create_future()
            requests.append(self._asked)
            answers.append(answer)
            if slot.worker is None:
                answer.set_result(None)
                continue
            self._open[self._asked] = _Open(slot.index, answer)
            slot.unanswered = True
            slot.send(question(self._asked))
        try:
            if answers:
                await asyncio.wait(answers, timeout=seconds)
        finally:
            for request in requests:
                self._open.pop(request, None)
        return [answer.result() if answer.done() else None for answer in answers]

    def poke(self, slot: Slot) -> None:
        """Ask a worker how it is; nobody waits for the answer."""
        self._asked += 1
        slot.unanswered = True
        slot.send(Describe(self._asked))

    def answered(self, description: Description) -> None:
        question = self._open.pop(description.request, None)
        if question is not None and not question.answer.done():
            question.answer.set_result(description)

    def abandon(self, slot: int) -> None:
        """The worker in `slot` is gone: it will answer nothing."""
        for question in self._open.values():
            if question.slot == slot and not question.answer.done():
                question.answer.set_result(None)
