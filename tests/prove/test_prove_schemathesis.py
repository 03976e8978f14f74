"""The long run of schemathesis: every phase, many examples, three seeds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.api_rig import served, user
from tests.outside import obliging_rig, schemathesis, suite


@pytest.mark.prove
@suite("schemathesis")
@pytest.mark.parametrize("seed", ["1", "2", "3"])
async def test_schemathesis_finds_no_server_error_in_many_examples(seed: str, tmp_path: Path) -> None:
    rig = obliging_rig()
    await rig.chat([user("a")], session_id="s")
    async with served(rig.app) as url:
        status, said = await schemathesis(url, tmp_path, "--max-examples", "100", "--seed", seed, limit=550)
    assert status == 0, said
    assert not rig.engine.live
