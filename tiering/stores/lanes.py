"""A queue of transfers and the thread that carries them out, step by step."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator

from agentserve.clock import Clock
from tiering.types import NEWS, Move, TierFault, Transfer, TransferDone

LOADS = (Move.LOAD, Move.FETCH, Move.BORROW, Move.PROBE)


def one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class Task:
    """A transfer under way. Its lane's thread owns it until it is reported."""

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer
        self.urgent = transfer.urgent
        self.ok = [False] * len(transfer.blocks)
        self.tried = 0  # blocks from the first on
        self.error = ""
        self.seconds = 0.0
        self.faults: tuple[TierFault, ...] = ()
        self.cancelled = False  # somebody wants it back; looked at before every block
        self.steps: Iterator[None] | None = None  # what is left to do, once it has begun

    def fail(self, error: str) -> None:
        """Keep the first reason."""
        self.error = self.error or error

    def done(self) -> TransferDone:
        """How it ended.

        What was taken back in between counts as never begun where nothing below has changed: a load's
        blocks are still where they were, and its pages mean nothing.
        """
        ok, cancelled, error = tuple(self.ok), False, self.error
        if self.cancelled and self.tried < len(ok):
            cancelled = self.transfer.move in LOADS or not any(ok)
            if cancelled:
                ok, error = (False,) * len(ok), ""
            else:
                error = error or f"cancelled after {sum(ok)} of {len(ok)} blocks"
        return TransferDone(self.transfer.id, ok, self.seconds, error, cancelled, self.faults)


_NOTHING = Task(Transfer(NEWS, Move.WRITE, ()))  # nobody has ordered anything for a while


class Lane:
    """First come, first served, urgent ones before the others; also between the steps of another.

    `run` turns a task into steps; it may raise, which ends the task. `report` is called once for every
    task that was put, on any thread.
    """

    def __init__(
        self,
        name: str,
        run: Callable[[Task], Iterator[None]],
        report: Callable[[TransferDone], None],
        clock: Clock,
        *,
        idle: Callable[[], None] | None = None,
        idle_seconds: float | None = None,
    ) -> None:
        """idle: called on the thread whenever there was nothing to do for `idle_seconds`; must not raise."""
        self._idle = idle
        self._idle_seconds = idle_seconds
        self._run = run
        self._report = report
        self._clock = clock
        self._changed = threading.Condition()
        self._urgent: deque[Task] = deque()
        self._plain: deque[Task] = deque()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(self, task: Task) -> None:
        with self._changed:
            if self._closing:
                raise RuntimeError("the mover is closed")
            (self._urgent if task.urgent else self._plain).append(task)
            self._changed.notify()

    def hurry(self, number: int) -> None:
        """Have transfer `number` go before what is not urgent, behind what is. Nothing if it is done."""
        with self._changed:
            for task in list(self._plain):
                if task.transfer.id == number:
                    self._plain.remove(task)
                    task.urgent = True
                    self._urgent.append(task)

    def cancel(self, number: int) -> None:
        """Take transfer `number` back, as far as it is not done. Does nothing if it is."""
        with self._changed:
            for task in (*self._urgent, *self._plain):
                if task.transfer.id == number:
                    self._cancel(task)

    def stop(self) -> None:
        """Take everything back; the thread ends after the step that it is in."""
        with self._changed:
            self._closing = True
            for task in (*self._urgent, *self._plain):
                self._cancel(task)
            self._changed.notify()

    def join(self, timeout: float) -> bool:
        """After `stop`. False if the thread still hangs in its step after `timeout` seconds: then the
        task is reported as failed, and the stores it uses must stay open."""
        self._thread.join(timeout)
        with self._changed:
            for task in (*self._urgent, *self._plain):
                task.fail("the mover was closed while it ran")
                task.cancelled = False  # it has begun, and may still write
                self._finish(task)
        return not self._thread.is_alive()

    def _cancel(self, task: Task) -> None:
        task.cancelled = True
        if task.steps is None:
            self._finish(task)

    def _work(self) -> None:
        while (task := self._next()) is not None:
            if task is _NOTHING:
                assert self._idle is not None
                self._idle()
                continue
            last = self._step(task)
            with self._changed:
                if last or task.cancelled:
                    self._finish(task)

    def _next(self) -> Task | None:
        with self._changed:
            while not (self._urgent or self._plain):
                if self._closing:
                    return None
                if not self._changed.wait(self._idle_seconds):
                    return _NOTHING
            task = (self._urgent or self._plain)[0]
            if task.steps is None:
                task.steps = self._run(task)
            return task

    def _step(self, task: Task) -> bool:
        """True if nothing is left to do."""
        assert task.steps is not None
        start = self._clock.now()
        try:
            next(task.steps)
        except StopIteration:
            return True
        except Exception as error:  # whatever a device or a store raises: the session computes instead
            task.fail(one_line(error))
            return True
        finally:
            task.seconds += self._clock.now() - start
        return task.tried >= len(task.ok)

    def _finish(self, task: Task) -> None:
        """Report a task, unless `close` gave it up before."""
        queue = self._urgent if task.urgent else self._plain
        if task in queue:
            queue.remove(task)
            self._report(task.done())
