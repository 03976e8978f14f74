"""llm-comply and schemathesis against the application on a real socket, with a scripted model."""

from __future__ import annotations

from pathlib import Path

from tests.api_rig import served, user
from tests.outside import comply, obliging_rig, schemathesis, suite


@suite("llm_comply")
async def test_llm_comply_finds_chat_completions_in_order() -> None:
    rig = obliging_rig()
    async with served(rig.app) as url:
        verdicts = await comply(url, "openai-chat")
    image = verdicts.pop("chat-image-input")
    assert image.startswith("failed: HTTP 400")  # refused, as the model sees no images
    reasoning = verdicts.pop("chat-reasoning-summary")
    assert reasoning == "skipped"  # of OpenAI's own models
    assert len(verdicts) == 7
    assert set(verdicts.values()) == {"passed"}, verdicts
    rig.check_rest()


@suite("schemathesis")
async def test_schemathesis_finds_no_server_error(tmp_path: Path) -> None:
    rig = obliging_rig()
    await rig.chat([user("a")], session_id="s")
    async with served(rig.app) as url:
        flags = ("--phases", "coverage,fuzzing", "--max-examples", "3", "--seed", "1")
        status, said = await schemathesis(url, tmp_path, *flags, limit=150)
    assert status == 0, said
    assert "passed" in said
    assert not rig.engine.live
