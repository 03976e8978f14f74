"""A reply that is cut anywhere stops no session (INV-105): in every family's form, in every dialect, the next
message goes on with the same session and its whole prefix, before and after its server dies."""

from __future__ import annotations

import pytest

from tests.cut_replies import DIALECTS, Dialect, check, cuts, said
from tests.reply_forms import WRITERS


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.__name__)
@pytest.mark.parametrize("family", WRITERS)
async def test_the_session_goes_on(family: str, dialect: type[Dialect]) -> None:
    assert await check(family, dialect, cuts(family)) > 1


@pytest.mark.prove
@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.__name__)
@pytest.mark.parametrize("family", WRITERS)
async def test_it_does_at_every_cut(family: str, dialect: type[Dialect]) -> None:
    assert await check(family, dialect, cuts(family, every=True)) > len(said(family)) // 3
