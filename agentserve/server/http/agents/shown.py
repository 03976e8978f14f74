"""Agents, sessions, turns and items as clients see them. Pure."""

from __future__ import annotations

from agentserve.server.agents.history import History
from agentserve.server.agents.records import (
    AgentConfig,
    AgentTool,
    ApprovalItem,
    CallItem,
    Item,
    ListingItem,
    MessageItem,
    Output,
    OutputItem,
    ReasoningItem,
    SavedAgent,
    Turn,
    Usage,
    UserItem,
)
from agentserve.server.agents.texts import arguments_of
from agentserve.server.http.agents.servers import listed_object, server_object
from agentserve.server.text_port import JsonObject


def agent_object(agent: SavedAgent) -> JsonObject:
    return {
        **_config(agent.config),
        "object": "agent",
        "created_at": int(agent.created),
        "updated_at": int(agent.updated),
        "metadata": agent.metadata,
    }


def session_object(history: History) -> JsonObject:
    head = history.head
    shown: JsonObject = {
        "id": head.id,
        "object": "agent.session",
        "agent": _config(head.config),
        "environment": {"type": "none"},
        "status": history.status,
        "required_actions": [
            _action(call, turn)
            for turn in [history.active]
            if turn is not None
            for call in history.required()
        ],
        "usage": usage_object(history.usage),
        "metadata": head.metadata,
        "created_at": int(head.created),
        "last_active_at": int(head.active),
        "error": None,
        "vault_ids": [],
    }
    if head.cache_ttl is not None:
        shown["prompt_cache_options"] = {"ttl": head.cache_ttl}
    return shown


def turn_object(history: History, turn: Turn) -> JsonObject:
    ttl = history.head.cache_ttl
    return {
        "id": turn.id,
        "object": "agent.session.turn",
        "session_id": history.id,
        "agent_id": history.head.config.id,
        "subagent_id": None,
        "status": turn.status,
        "created_at": int(turn.created),
        "started_at": int(turn.created),
        "completed_at": None if turn.completed is None else int(turn.completed),
        "error": None if turn.error is None else {"code": turn.error.code, "message": turn.error.message},
        "usage": usage_object(turn.usage),
        "prompt_cache_options": None if ttl is None else {"ttl": ttl},
    }


def item_objects(history: History, turn: str | None = None) -> list[JsonObject]:
    """Oldest first."""
    over = {t.id for t in history.turns if t.over}
    outputs = history.outputs()
    return [
        item_object(item, of, outputs, over=of in over)
        for item, of in history.items(turn)
        if is_shown(history, item)
    ]


def is_shown(history: History, item: Item) -> bool:
    """What MCP tools return is shown with their calls; a decision is shown by what came of it."""
    if isinstance(item, OutputItem):
        called = history.call(item.call)
        return called is None or called[0].kind != "mcp"
    return not isinstance(item, ApprovalItem)


def request_id(call: CallItem) -> str:
    """By which a user's decision names the call."""
    return f"mcpr_{call.id.rpartition('_')[2]}"


def _action(call: CallItem, turn: Turn) -> JsonObject:
    if call.kind != "mcp":
        return {
            "type": "function_call",
            "call_id": call.call,
            "name": call.name,
            "arguments": arguments_of(call),
            "turn_id": turn.id,
        }
    return {
        "type": "mcp_approval_request",
        "request_id": request_id(call),
        "turn_id": turn.id,
        "request": {
            "type": "mcp_tool_call",
            "server_label": call.server,
            "name": call.remote,
            "arguments": arguments_of(call),
            "message": f"Allow {call.server} to run {call.remote}?",
        },
    }


def item_object(
    item: Item, turn: str, outputs: dict[str, OutputItem], *, over: bool, begun: bool = False
) -> JsonObject:
    """`over`: its turn is; `begun`: it is not whole yet."""
    shown: JsonObject = {"id": item.id, "turn_id": turn}
    match item:
        case UserItem():
            content = [{"type": "input_text", "text": text} for text in item.texts]
            shown |= {"type": "message", "role": "user", "status": "completed", "phase": None}
            shown["content"] = content
        case MessageItem():
            shown |= {"type": "message", "role": "assistant", "status": _status(item.whole, begun)}
            shown["phase"] = None if begun else "final_answer" if item.final else "commentary"
            shown["content"] = [] if begun else [{"type": "output_text", "text": item.text}]
        case ReasoningItem():
            shown |= {"type": "reasoning", "status": _status(item.whole, begun)}
            shown["summary"] = [] if begun else [{"type": "summary_text", "text": item.text}]
        case CallItem(kind="mcp"):
            output = outputs.get(item.call)
            shown |= {"type": "mcp_call", "server_label": item.server, "name": item.remote}
            shown["arguments"] = arguments_of(item)
            shown["output"] = None if output is None or output.output is None else _output(output.output)
            shown["error"] = None if output is None else output.error
            shown["approval_request_id"] = request_id(item) if item.approval else None
            shown["status"] = _call_status(item, output, over=over)
        case ListingItem():
            shown |= {"type": "mcp_list_tools", "server_label": item.server, "error": item.error}
            shown["tools"] = [listed_object(tool) for tool in item.tools]
        case CallItem():
            shown |= {"type": "function_call", "call_id": item.call, "name": item.name}
            shown["arguments"] = arguments_of(item)
            shown["status"] = _call_status(item, outputs.get(item.call), over=over)
        case OutputItem():
            shown |= {"type": "function_call_output", "call_id": item.call, "error": item.error}
            shown["output"] = None if item.output is None else _output(item.output)
            shown["status"] = "completed" if item.error is None else "failed"
    return shown


def usage_object(usage: Usage | None) -> JsonObject | None:
    if usage is None:
        return None
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.generated,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.generated,
    }


def _call_status(call: CallItem, output: OutputItem | None, *, over: bool) -> str:
    if output is not None:
        return "completed" if output.error is None else "failed"
    return "incomplete" if not call.whole or (over and not call.background) else "in_progress"


def _status(whole: bool, begun: bool) -> str:
    return "in_progress" if begun else "completed" if whole else "incomplete"


def _output(output: Output) -> str | list[JsonObject]:
    if isinstance(output, str):
        return output
    return [{"type": "input_text", "text": part.get("text", "")} for part in output]


def _config(config: AgentConfig) -> JsonObject:
    kind = "text" if config.schema is None else "json_schema"
    form: JsonObject = {"type": kind} if config.schema is None else {"type": kind, "schema": config.schema}
    settings = dict(config.settings)
    if "max_completion_tokens" in settings:
        settings["max_output_tokens"] = settings.pop("max_completion_tokens")
    return {
        "id": config.id,
        "name": config.name,
        "model": config.model,
        "instructions": config.instructions,
        "tools": [*map(_tool, config.tools), *map(server_object, config.servers)],
        "reasoning": {"effort": config.effort, "summary": config.summary},
        "text": {"format": form, "verbosity": config.verbosity},
        "service_tier": config.service_tier,
        "multi_agent": {"enabled": False, "max_concurrent_subagents": None},
        "compaction": {"async": False},
        **({} if config.webhook is None else {"webhook": config.webhook}),
        **settings,
    }


def _tool(tool: AgentTool) -> JsonObject:
    shown: JsonObject = {
        "type": tool.kind,
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "defer_loading": tool.defer_loading,
        "async": tool.background,
    }
    if tool.webhook is not None:
        shown["webhook"] = tool.webhook
    if tool.strict is not None:
        shown["strict"] = tool.strict
    if tool.timeout is not None:
        shown["timeout"] = tool.timeout
    return shown
