"""The long run of schemathesis: every phase, many examples, three seeds. Each phase is a run of its own: all
in one took 450 s on a busy machine, where 550 are what a run may take before it is said to hang."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.api_rig import served, user
from tests.outside import obliging_rig, schemathesis, suite


@pytest.mark.prove
@suite("schemathesis")
@pytest.mark.parametrize("seed", ["1", "2", "3"])
@pytest.mark.parametrize("phases", ["examples,coverage", "fuzzing", "stateful"])
async def test_schemathesis_finds_no_server_error_in_many_examples(
    phases: str, seed: str, tmp_path: Path
) -> None:
    rig = obliging_rig()
    await rig.chat([user("a")], session_id="s")
    async with served(rig.app) as url:
        flags = ("--phases", phases, "--max-examples", "100", "--seed", seed)
        status, said = await schemathesis(url, tmp_path, *flags, limit=550)
    assert status == 0, said
    assert not rig.engine.live
