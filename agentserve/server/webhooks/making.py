"""Puts the server's webhooks together."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

from agentserve.server.webhooks.hooks import Hooks
from tools_bridge.webhooks.address import AddressPolicy
from tools_bridge.webhooks.attempt import HttpSender, Sender
from tools_bridge.webhooks.clock import LoopTime
from tools_bridge.webhooks.courier import Courier
from tools_bridge.webhooks.dial import SystemResolver
from tools_bridge.webhooks.outbox import PATIENCE, Outbox
from tools_bridge.webhooks.store import Store
from tools_bridge.webhooks.types import Time


def make_hooks(
    folder: Path | None = None,
    *,
    allow_private: bool = False,
    callback_url: str = "",
    patience: float = PATIENCE,
    wall: Callable[[], float] = time.time,
    sender: Sender | None = None,
    clock: Time | None = None,
    draw: Callable[[], float] = random.random,
    open_store: Callable[[Path], Store] = Store,
) -> Hooks:
    """`folder` None: nothing is kept. `allow_private`: addresses of private networks and of this machine may
    be called, without TLS. `callback_url`: where receivers reach this server. ValueError, OSError."""
    policy, clock = AddressPolicy(allow_private=allow_private), clock or LoopTime(folder)
    outbox = Outbox(folder, policy, clock.now, patience=patience, open_store=open_store)
    if isinstance(clock, LoopTime) and folder is not None:
        clock.keep(folder)
    courier = Courier(outbox, sender or HttpSender(policy, SystemResolver()), clock, draw=draw)
    return Hooks(courier, wall, callback_url)
