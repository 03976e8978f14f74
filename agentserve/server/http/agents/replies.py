"""Shapes of replies of the Agents API, for `/openapi.json`; a test holds real replies against these."""

from __future__ import annotations

from typing import Literal

import msgspec

from agentserve.server.text_port import JsonObject


class AgentUsageDetails(msgspec.Struct):
    cached_tokens: int


class AgentReasoningDetails(msgspec.Struct):
    reasoning_tokens: int


class AgentUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: AgentUsageDetails
    output_tokens: int
    output_tokens_details: AgentReasoningDetails
    total_tokens: int


class AgentShape(msgspec.Struct, kw_only=True):
    """An agent's configuration; settings of sampling are there where they were given."""

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


class AgentReply(AgentShape, kw_only=True):
    object: Literal["agent"]
    created_at: int
    updated_at: int
    metadata: dict[str, str]


class AgentSessionReply(msgspec.Struct, kw_only=True):
    """`prompt_cache_options` is there where it was given."""

    id: str
    object: Literal["agent.session"]
    agent: AgentShape
    environment: JsonObject
    status: Literal["idle", "in_progress", "requires_action"]
    required_actions: list[JsonObject]
    usage: AgentUsage | None
    metadata: dict[str, str]
    created_at: int
    last_active_at: int
    error: None
    vault_ids: list[str]


class AgentTurnReply(msgspec.Struct):
    id: str
    object: Literal["agent.session.turn"]
    session_id: str
    agent_id: str
    subagent_id: None
    status: Literal["in_progress", "waiting", "completed", "failed", "cancelled"]
    created_at: int
    started_at: int
    completed_at: int | None
    error: JsonObject | None
    usage: AgentUsage | None
    prompt_cache_options: JsonObject | None


class AgentList(msgspec.Struct):
    object: Literal["list"]
    data: list[AgentReply]
    first_id: str | None
    last_id: str | None
    has_more: bool


class AgentSessionList(msgspec.Struct):
    object: Literal["list"]
    data: list[AgentSessionReply]
    first_id: str | None
    last_id: str | None
    has_more: bool


class AgentTurnList(msgspec.Struct):
    object: Literal["list"]
    data: list[AgentTurnReply]
    first_id: str | None
    last_id: str | None
    has_more: bool
