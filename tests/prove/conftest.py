"""Long proofs say what they have done, whatever pytest captures."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest) -> Callable[[str], None]:
    def say(text: str) -> None:
        with capsys.disabled():
            print(f"\n{request.node.name}: {text}", flush=True)

    return say
