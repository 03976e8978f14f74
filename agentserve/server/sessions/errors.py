"""Why a turn has no answer. Plain errors: a dialect of the API says how its clients are told."""

from __future__ import annotations


class TurnError(Exception):
    """A turn that was rolled back; the message is one line for the client."""


class TurnRefused(TurnError):
    """It can never run on this engine."""


class TurnShed(TurnError):
    """The queue cannot keep what was promised for it; it was not begun."""

    def __init__(self, reason: str, wait: float) -> None:
        """wait: seconds after which there would be room."""
        super().__init__(reason)
        self.wait = wait


class TurnFailed(TurnError):
    """The engine failed on it."""


class TurnCancelled(TurnError):
    """Somebody else ended it."""


class SessionClosed(TurnError):
    """Its session was closed before it was over."""

    def __init__(self) -> None:
        super().__init__("The session was closed while its turn ran.")


class StorageFailed(TurnError):
    """What must outlive the server could not be written to disk."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"The session could not be kept: {reason}.")
