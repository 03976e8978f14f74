"""What the Agents API's replies have, for who reads /openapi.json. Tests hold real ones against it."""

from __future__ import annotations

from typing import Literal

import msgspec

from agentserve.server.text_port import JsonObject


class AgentShown(msgspec.Struct, kw_only=True):
    """With the settings of ours that it has."""

    id: str
    name: str | None
    model: str
    instructions: str | None
    tools: list[JsonObject]
    reasoning: JsonObject
    text: JsonObject
    service_tier: str
    multi_agent: JsonObject
    compaction: JsonObject


class AgentReply(AgentShown, kw_only=True):
    object: Literal["agent"]
    created_at: int
    updated_at: int
    metadata: dict[str, str]


class RequiredAction(msgspec.Struct):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: object
    turn_id: str


class TokenUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class SessionReply(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["agent.session"]
    agent: AgentShown
    environment: JsonObject
    status: Literal["idle", "in_progress", "requires_action", "failed"]
    required_actions: list[RequiredAction]
    usage: TokenUsage | None
    metadata: dict[str, str]
    created_at: int
    last_active_at: int
    error: str | None
    vault_ids: list[str]
    prompt_cache_options: JsonObject | None = None


class TurnReply(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["agent.session.turn"]
    session_id: str
    agent_id: str
    subagent_id: str | None
    status: Literal["queued", "in_progress", "waiting", "completed", "failed", "cancelled"]
    created_at: int
    started_at: int | None
    completed_at: int | None
    error: JsonObject | None
    usage: TokenUsage | None
    prompt_cache_options: JsonObject | None
