"""The long run of schemathesis: every phase, many examples, three seeds. In several runs: all
in one took 450 s on a busy machine, the fuzzing alone 340, and at 550 s a run is said to hang."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.api_rig import served, user
from tests.outside import obliging_rig, schemathesis, suite

FUZZING = ("--phases", "fuzzing", "--include-path-regex")
RUNS = {  # together: every phase for every path
    "examples": ("--phases", "examples,coverage"),
    "stateful": ("--phases", "stateful"),
    "fuzzing agents": (*FUZZING, "^/v1/(agents|webhook)"),
    "fuzzing v1": (*FUZZING, "^/v1/(?!agents|webhook)"),
    "fuzzing others": (*FUZZING, "^/(?!v1/)"),
}


@pytest.mark.prove
@suite("schemathesis")
@pytest.mark.parametrize("seed", ["1", "2", "3"])
@pytest.mark.parametrize("run", RUNS)
async def test_schemathesis_finds_no_server_error_in_many_examples(
    run: str, seed: str, tmp_path: Path
) -> None:
    rig = obliging_rig()
    await rig.chat([user("a")], session_id="s")
    async with served(rig.app) as url:
        flags = (*RUNS[run], "--max-examples", "100", "--seed", seed)
        status, said = await schemathesis(url, tmp_path, *flags, limit=550)
    assert status == 0, said
    assert not rig.engine.live
