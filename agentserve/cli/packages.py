"""Is the package `kernels` ours? Hugging Face publishes one of the same import name."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

import agentserve


def foreign_kernels() -> str | None:
    """One line that says whose `kernels` would be imported, if it is not ours; None if it is."""
    ours = Path(agentserve.__file__).resolve().parent.parent
    spec = importlib.util.find_spec("kernels")
    if spec is None or not spec.submodule_search_locations:
        return f"the package kernels is missing beside {ours / 'agentserve'}: install agentserve-llm again"
    found = Path(next(iter(spec.submodule_search_locations))).resolve()
    advice = "install agentserve-llm into an environment of its own"
    if found.parent != ours:
        return f"the import name kernels belongs to {found}, not to AgentServe: {advice}"
    try:
        other = importlib.metadata.distribution("kernels")
    except importlib.metadata.PackageNotFoundError:
        return None
    if Path(str(other.locate_file("kernels"))).resolve() == found:
        return f"the distribution kernels {other.version} has overwritten AgentServe's {found}: {advice}"
    return None
