"""A model as Anthropic's models API shows it."""

from __future__ import annotations

from datetime import UTC, datetime

from agentserve.server.http.context import ServerContext
from agentserve.server.text_port import JsonObject


def anthropic_model(context: ServerContext, name: str) -> JsonObject:
    """`name`: one that the model is served by. Prompt and answer share the context."""
    longest = context.engine.hello.max_model_len
    created = datetime.fromtimestamp(int(context.started), UTC)
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": longest,
        "max_tokens": longest,
    }
