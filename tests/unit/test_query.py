"""Query parameters of the session routes: what cannot be meant is refused, and names itself."""

from __future__ import annotations

import pytest

from tests.waiting_sessions import path, waiting


@pytest.mark.parametrize(
    "query",
    [
        *("stream=yes", "stream=TRUE", "stream=", "stream=2", "stream=false&stream=true"),
        *("epoch=", "epoch=-1", "epoch=1e3", "epoch=١", "epoch=" + "9" * 19, "epoch=0&epoch=0"),
        *("max_tokens=x", "max_tokens=0"),
    ],
)
async def test_an_upload_with_a_parameter_that_means_nothing_takes_nothing(query: str) -> None:
    s = await waiting()
    reply = await s.rig.client.post(path(s.id, f"tool_results/{s.calls[0]}/stream?{query}"), content=b"rain")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, query.partition("=")[0])
    assert s.rig.engine.news == []  # nobody was told that a result is coming
    assert not (await s.rig.session(s.id))["pending_tool_calls"][0]["result_taken"]


@pytest.mark.parametrize(("stream", "kind"), [("1", "text/event-stream"), ("0", "application/json")])
async def test_numbers_are_flags_too(stream: str, kind: str) -> None:
    s = await waiting()
    await s.give(1, "noon")
    target = path(s.id, f"tool_results/{s.calls[0]}/stream?stream={stream}")
    reply = await s.rig.client.post(target, content=b"rain")
    assert (reply.status_code, reply.headers["content-type"].split(";")[0]) == (200, kind)


@pytest.mark.parametrize(
    "query",
    [
        *("detail=yes", "detail=", "detail=1&detail=1", "limit=", "limit=0", "limit=1001", "limit=x"),
        *("limit=" + "9" * 30, "limit=5&limit=6"),
    ],
)
async def test_a_list_with_a_parameter_that_means_nothing_is_refused(query: str) -> None:
    s = await waiting()
    reply = await s.rig.client.get(f"/agentserve/sessions?{query}")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, query.partition("=")[0])


async def test_details_are_for_fewer_sessions() -> None:
    s = await waiting()
    for query, status in (("detail=1&limit=200", 200), ("detail=1&limit=201", 400), ("limit=1000", 200)):
        assert (await s.rig.client.get(f"/agentserve/sessions?{query}")).status_code == status
    listed = (await s.rig.client.get("/agentserve/sessions?detail=1")).json()["data"]
    assert "residency" in listed[0]


@pytest.mark.parametrize("query", ["after=", "after=x", "after=now&after=now"])
async def test_events_after_nothing_that_there_is_are_refused(query: str) -> None:
    s = await waiting()
    reply = await s.rig.client.get(path(s.id, f"events?{query}"))
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "after")
