"""Test suites that others wrote, run as their users run them: as commands against a URL."""

from __future__ import annotations

import asyncio
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from agentserve.messages import Submit, unpack_tokens
from tests.api_rig import Rig, hermes
from tests.fakes import Script, ScriptedEngine, say


def suite(module: str) -> pytest.MarkDecorator:
    """The test is left out where the suite is not installed; the `dev` extra installs it."""
    return pytest.mark.skipif(find_spec(module) is None, reason=f"{module} is not installed")


def obliging_rig(**options: Any) -> Rig:
    """A model that calls the tool these suites offer when it has to call one, and says hello otherwise."""

    def reply(submit: Submit) -> Script:
        shown = bytes(token for token in unpack_tokens(submit.tokens) if token < 256)
        if submit.sampling.grammar is not None and b"get_weather" in shown:
            return say(hermes("get_weather", '{"location": "San Francisco"}'))
        return say("Hello there.")

    return Rig(ScriptedEngine(reply), **options)


async def command(
    code: str, *arguments: str, limit: float, folder: Path | None = None
) -> tuple[int, str, str]:
    """Run a command's entry point in this Python, in `folder`: (status, what it said, errors)."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        code,
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=folder,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), limit)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def comply(url: str, kind: str, *flags: str, model: str = "tiny") -> dict[str, str]:
    """llm-comply's verdicts by test: "passed", "failed: why", "skipped"."""
    _, out, err = await command(
        "import sys; from llm_comply.cli import main; sys.exit(main())",
        *("-u", f"{url}/v1", "-k", "x", "-m", model, "--format", kind, "--json", *flags),
        limit=120,
    )
    assert out, err
    results = json.loads(out)["results"]
    return {
        result["id"]: result["status"]
        if result["status"] != "failed"
        else f"failed: {'; '.join(result.get('errors') or [])}"
        for result in results
    }


async def schemathesis(url: str, folder: Path, *flags: str, limit: float) -> tuple[int, str]:
    """`st run` over the server's OpenAPI document, but for streams that have no end of their own. `folder`:
    where it keeps what it learns."""
    status, out, err = await command(
        "from schemathesis.cli import schemathesis; schemathesis()",
        *("run", f"{url}/openapi.json", "--exclude-path-regex", "/events$"),
        *("--checks", "not_a_server_error,response_schema_conformance,status_code_conformance"),
        *("--no-color", *flags),
        limit=limit,
        folder=folder,
    )
    return status, out + err
