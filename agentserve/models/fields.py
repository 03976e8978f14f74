"""Typed reads from untrusted metadata (`config.json`, GGUF keys), with errors that name the place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agentserve.models.errors import ModelError

# No supported model comes near these; a bigger size is damage, and memory must not be asked for by it.
MAX_LAYERS = 1024
MAX_POSITIONS = 16 << 20
MAX_VOCABULARY = 4 << 20
MAX_WIDTH = 1 << 20  # hidden, intermediate and head sizes, numbers of heads
_LARGEST_SIZE = 1 << 31
_LARGEST_NUMBER = 1e300
_SHOWN = 80  # characters of a wrong value


@dataclass(frozen=True, slots=True)
class Fields:
    """A mapping and where it came from. A missing or wrong value is a `ModelError`."""

    values: Mapping[str, object]
    place: str

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def size(self, key: str, default: int | None = None, *, most: int = _LARGEST_SIZE) -> int:
        """A whole number from 1 to `most`."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(key, f"must be a whole number of at least 1, is {_show(value)}")
        if value > most:
            raise self.error(key, f"must be at most {most}, is {_show(value)}")
        return value

    def optional_size(self, key: str) -> int | None:
        return self.size(key) if self.has(key) else None

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _LARGEST_NUMBER:
            raise self.error(key, f"must be a finite number, is {_show(value)}")
        return float(value)

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.number(key, default)
        if value <= 0:
            raise self.error(key, f"must be above 0, is {_show(value)}")
        return value

    def optional_number(self, key: str) -> float | None:
        return self.number(key) if self.has(key) else None

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, is {_show(value)}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"must be a string, is {_show(value)}")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id or a list of ids; none where the key is absent."""
        value = self.values.get(key)
        if value is None:
            return ()
        items = value if isinstance(value, list) else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) or item < 0 for item in items):
            raise self.error(key, f"must be a token id or a list of them, is {_show(value)}")
        return tuple(dict.fromkeys(items))

    def items(self, key: str, length: int) -> list[object] | None:
        """A list with at least `length` entries, cut to it; None where the key is absent."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < length:
            raise self.error(key, f"must be a list of at least {length} entries")
        return value[:length]

    def part(self, key: str) -> Fields | None:
        """A nested mapping; None where the key is absent."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, f"must be an object, is {_show(value)}")
        return Fields(value, f"{self.place}: {key}")

    def error(self, key: str, problem: str) -> ModelError:
        return ModelError(f"{self.place}: {key} {problem}")

    def _get(self, key: str, default: object) -> object:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.place}: {key} is missing")
        return value


def _show(value: object) -> str:
    """`value` for an error, cut where it is long."""
    try:
        shown = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, a deep list
        return f"a {type(value).__name__} too large to show"
    return shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "..."
