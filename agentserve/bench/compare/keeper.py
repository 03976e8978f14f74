"""keeper.py LIFELINE COMMAND...: run COMMAND and let nothing that it has started live on.

COMMAND's processes are ended when it ends, and when file descriptor LIFELINE (a pipe whose other end the
measuring process holds) reaches its end: then that process wants it so, or is itself dead, however it died.
The exit status is COMMAND's, 128 + N for signal N. A script of the standard library alone, run as a file.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL
_PR_SET_CHILD_SUBREAPER = 36


def main(arguments: list[str]) -> int:
    lifeline, command = int(arguments[0]), arguments[1:]
    if sys.platform == "linux":  # orphans among the descendants become ours, whatever session they are in
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # handlers, unlike SIG_IGN, do not pass on to COMMAND
    try:
        child = subprocess.Popen(command)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        return 127
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):  # COMMAND's alone: whoever reads them sees their end when COMMAND ends
        os.dup2(nothing, descriptor)
    if not _ended_first(child, lifeline):
        child.terminate()
        try:
            child.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
    status = child.wait()
    _end_descendants()
    return 128 - status if status < 0 else status


def _ended_first(child: subprocess.Popen[bytes], lifeline: int) -> bool:
    """Wait for the child's end (True) or the lifeline's (False)."""
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)
    watched = os.pidfd_open(child.pid) if hasattr(os, "pidfd_open") else None
    if watched is not None:
        poll.register(watched, select.POLLIN)
    while child.poll() is None:
        ready = poll.poll(None if watched is not None else 100)
        if any(descriptor == lifeline for descriptor, _ in ready):
            return child.poll() is not None
    return True


def _end_descendants() -> None:
    """Kill until none is left; each round may show children of those killed in the round before."""
    while found := list(descendants(os.getpid())):
        for process in found:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
        while True:
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    break
            except ChildProcessError:
                break
        time.sleep(0.01)


def descendants(root: int, proc: Path = Path("/proc")) -> Iterator[int]:
    """Process ids of the children of `root`, their children, and so on; none where there is no /proc."""
    children: dict[int, list[int]] = {}
    for entry in proc.glob("[0-9]*/stat"):
        try:
            text = entry.read_text(errors="replace")
        except OSError:  # it has ended meanwhile
            continue
        # The name in parentheses may hold anything, parentheses and spaces too.
        parent = int(text.rpartition(")")[2].split()[1])
        children.setdefault(parent, []).append(int(entry.parent.name))
    found = [root]
    while found:
        for child in children.get(found.pop(), ()):
            yield child
            found.append(child)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
