"""A process that never outlives the one that started it, and leaves signals to that one."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys

log = logging.getLogger("agentserve.worker")

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies; leave now if it already has."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            log.warning("no parent-death signal: %s", os.strerror(ctypes.get_errno()))
    if os.getppid() != parent:
        raise SystemExit(1)
    # A terminal's Ctrl-C and a service manager's SIGTERM reach every process of the group; draining is
    # the API process's decision, and Shutdown or the end of the socket tell it to us.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
