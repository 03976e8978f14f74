"""The client is light: it brings nothing of the server with it."""

from __future__ import annotations

import subprocess
import sys

import agentserve.client

LIGHT = """
import sys, agentserve.client
heavy = {"torch", "numpy", "triton", "lmdb", "starlette", "uvicorn", "tokenizers", "xgrammar", "jinja2"}
heavy |= {"kernels", "tiering", "tools_bridge"}
print(sorted(name for name in sys.modules if name.split(".")[0] in heavy))
print(sorted({".".join(name.split(".")[:2]) for name in sys.modules if name.startswith("agentserve")}))
"""


def test_what_it_loads() -> None:
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "['agentserve', 'agentserve.client', 'agentserve.tools']"]


def test_all_that_it_names_is_there() -> None:
    assert sorted(agentserve.client.__all__) == agentserve.client.__all__
    assert all(hasattr(agentserve.client, name) for name in agentserve.client.__all__)
