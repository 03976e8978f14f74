"""The stream of a response whose events are kept no longer. Pure."""

from __future__ import annotations

from agentserve.server.http.responses.events import Fold, end_of
from agentserve.server.http.responses.tools import Toolbox
from agentserve.server.text_port import JsonObject


def replayed(response: JsonObject, last: int, after: int | None) -> list[JsonObject]:
    """The events of a response that is over, each text in one piece.

    `last`: the number of the last event that there was; `after`: that of the last one the reader has. Such
    a reader gets the end alone, which has the whole response: what it missed cannot be told piece by piece.
    """
    end: JsonObject = {
        "type": end_of(response),
        "sequence_number": last if after is None else max(last, after + 1),
        "response": response,
    }
    if after is not None:
        return [end]
    begun = {
        **response,
        "output": [],
        "completed_at": None,
        "usage": None,
        "error": None,
        "incomplete_details": None,
    }
    fold = Fold(begun, Toolbox(), lambda prefix: prefix)
    events = fold.created() + fold.in_progress()
    for item in response["output"]:
        events += fold.again(item)
    end["sequence_number"] = max(last, fold.sequence + 1)
    return [*events, end]
