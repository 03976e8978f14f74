"""Values that tools are talked about with, whatever the API dialect."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A function the model may call. `parameters` is a JSON schema; {} means it takes none."""

    name: str
    parameters: dict[str, object] = field(default_factory=dict)
    strict: bool = False
