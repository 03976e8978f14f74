"""Kernel threads of the tests wait as those of workers do; set before anything imports torch."""

from __future__ import annotations

import os

from agentserve.server.workers.supervisor import KERNEL_THREADS

for name, value in KERNEL_THREADS.items():
    os.environ.setdefault(name, value)
