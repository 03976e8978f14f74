"""The contract of the pure rooms names every part of `tiering` but the stores."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_control_module_is_held_pure() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    pure = next(contract for contract in contracts if contract["name"].startswith("The core is pure"))
    modules = {
        path.stem for path in (ROOT / "tiering").iterdir() if path.stem not in ("__init__", "__pycache__")
    }
    assert {f"tiering.{name}" for name in modules - {"stores"}} <= set(pure["source_modules"])
    assert "tiering.stores" not in pure["source_modules"]
