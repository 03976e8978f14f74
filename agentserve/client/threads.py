"""Functions in threads that nobody has to wait for: a tool that hangs holds up neither a turn nor the end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")


def start(work: Callable[[], object], name: str) -> Thread:
    thread = Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


async def in_thread(work: Callable[[], T]) -> T:
    """What it returns or raises. When this is cancelled the thread goes on by itself, and what it comes to is
    dropped."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(how: Callable[[Any], None], value: Any) -> None:
        if not done.done():
            how(value)

    def run() -> None:
        try:
            how, value = done.set_result, work()
        except StopIteration as error:  # a future cannot have it
            how, value = done.set_exception, RuntimeError(f"StopIteration: {error}")  # type: ignore[assignment]
        except BaseException as error:  # it belongs to whoever waits
            how, value = done.set_exception, error  # type: ignore[assignment]
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, how, value)

    start(run, "agentserve-tool")
    return await done
