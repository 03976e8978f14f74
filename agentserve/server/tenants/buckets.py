"""Token buckets. Pure: the time is passed in."""

from __future__ import annotations

MINUTE = 60.0


class Bucket:
    """Fills at `per_minute`, up to as much. What is taken may exceed what is there: what a turn costs is
    known at its end only, so a tenant pays for it afterwards, by waiting."""

    __slots__ = ("_at", "_level", "per_minute")

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def level(self, now: float) -> float:
        """What is there; below zero: what is owed."""
        if now > self._at:  # a clock that goes back fills nothing twice
            self._level = min(
                float(self.per_minute), self._level + (now - self._at) * self.per_minute / MINUTE
            )
            self._at = now
        return self._level

    def take(self, count: float, now: float) -> None:
        self._level = self.level(now) - count

    def wait(self, count: float, now: float) -> float:
        """Seconds until `count` are there."""
        return max(count - self.level(now), 0.0) * MINUTE / self.per_minute

    def full_in(self, now: float) -> float:
        """Seconds until it is full."""
        return self.wait(self.per_minute, now)
