"""A page of a list has room for so many bytes: what is larger comes with the next one."""

from __future__ import annotations

from agentserve.server.http.responses import lists
from agentserve.server.http.responses.lists import MOST_BYTES, Wanted, page


def test_a_page_has_as_many_as_have_room_and_one_at_least() -> None:
    items = [{"id": str(number), "text": "é" * (MOST_BYTES // 8)} for number in range(9)]
    items.insert(4, {"id": "large", "text": "x" * 2 * MOST_BYTES})
    seen: list[str] = []
    pages = 0
    more = True
    while more:
        told = page(items, Wanted("asc", 100, seen[-1] if seen else None))
        assert 1 <= len(told["data"]) <= 4
        seen += [item["id"] for item in told["data"]]
        assert (told["first_id"], told["last_id"]) == (told["data"][0]["id"], seen[-1])
        more, pages = told["has_more"], pages + 1
    assert seen == [item["id"] for item in items]
    assert pages == 5


def test_small_ones_are_as_many_as_were_asked_for() -> None:
    items = [{"id": str(number)} for number in range(300)]
    assert len(page(items, Wanted("asc", lists.MOST))["data"]) == lists.MOST
