"""What a worker does while its model computes, on a second thread.

The two never work at the same time on anything but that: the second one begins when the first has entered
the kernels, where Python's lock is free, and the first one waits for it before it goes on. So the loop's
objects need no locks, and everything happens in an order that the recorded log has.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

Work = Callable[[], None]


class Meanwhile:
    """One piece of work per step. `arm`, then `begin` when the model computes, then `finish`.

    A step that never comes to the kernels never calls `begin`: then `finish` does the work itself.
    """

    def __init__(self) -> None:
        self._armed: Work | None = None
        self._running = False
        self._work: SimpleQueue[Work | None] = SimpleQueue()
        self._ended: SimpleQueue[BaseException | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="meanwhile", daemon=True)
        self._thread.start()

    def arm(self, work: Work) -> None:
        self._armed = work

    def begin(self) -> None:
        """The model computes from now on. Ignored when there is nothing to do, or it has begun."""
        if self._armed is not None:
            work, self._armed = self._armed, None
            self._running = True
            self._work.put(work)

    def finish(self) -> None:
        """Returns when the work is done; raises what it raised."""
        if self._armed is not None:
            work, self._armed = self._armed, None
            work()
        elif self._running:
            self._running = False
            error = self._ended.get()
            if error is not None:
                raise error

    def close(self) -> None:
        """End the thread, which has nothing to do."""
        self._work.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except BaseException as error:
                self._ended.put(error)
            else:
                self._ended.put(None)
