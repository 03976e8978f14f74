"""/openapi.json says of each route how it refuses, in the shape of its API; and it does."""

from __future__ import annotations

import re

from starlette.routing import Route

from agentserve.server.http.access import RULES, Access
from tests.fakes import ScriptedEngine
from tests.tenants_rig import Tenants

METHODS = {"GET", "POST", "DELETE", "PUT", "PATCH"}


async def test_every_route_says_how_it_refuses() -> None:
    rig = Tenants(ScriptedEngine())
    document = (await rig.a.get("/openapi.json")).json()
    seen = 0
    for route in rig.app.routes:
        assert isinstance(route, Route)
        if route.path == "/openapi.json":
            continue
        access = RULES[route.path].access
        for method in (route.methods or set()) & METHODS:
            path = route.path.replace(":path", "")
            said = document["paths"][path][method.lower()]
            answers = said["responses"]
            told = {status for status in ("401", "403", "429") if status in answers}
            wanted = {
                Access.OPEN: set(),
                Access.ADMIN: {"401", "403"},
                Access.TENANT: {"401", "403", "429"},
            }
            assert told == wanted[access], path
            assert said["security"] == ([] if access is Access.OPEN else [{"bearer": []}, {"key": []}])
            if access is Access.OPEN:
                continue
            kind = "MessagesErrorReply" if path.startswith("/v1/messages") else "ErrorReply"
            for status in told:
                shape = answers[status]["content"]["application/json"]["schema"]
                assert shape == {"$ref": f"#/components/schemas/{kind}"}
            if access is Access.TENANT:
                assert answers["429"]["headers"]["retry-after"]["schema"]["minimum"] == 1
            refused = await rig.nobody.request(method, re.sub(r"\{[^}]*\}", "x", path))
            assert refused.status_code == 401
            assert set(answers["401"]["headers"]) <= set(refused.headers)
            assert ("type" in refused.json()) == (kind == "MessagesErrorReply")
            seen += 1
    assert seen > 60
