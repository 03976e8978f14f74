"""A client of AgentServe: agents' sessions, their turns as typed events, tools that run here.

`AsyncClient` is for asyncio, `Client` is its twin without. Nothing of the server is imported, and no torch.
"""

from agentserve.client.aio import AsyncBranch, AsyncClient, AsyncSession
from agentserve.client.aio_turn import AsyncTurn
from agentserve.client.protocol.errors import (
    BadReply,
    BadRequest,
    ClientError,
    Conflict,
    ConnectionFailed,
    Forbidden,
    NotFound,
    RateLimited,
    ServerFailed,
    StatusError,
    StreamLost,
    TooLarge,
    TurnFailed,
    Unauthorized,
    Unprocessable,
)
from agentserve.client.protocol.events import (
    Call,
    ErrorTold,
    Event,
    Message,
    Other,
    Reasoning,
    ReasoningDelta,
    Receipt,
    Resynced,
    SessionInfo,
    TextDelta,
    ToolCalled,
    ToolReturned,
    TurnEnded,
    TurnResult,
    TurnStarted,
    Usage,
)
from agentserve.client.protocol.flow import Retry
from agentserve.client.sync import Branch, Client, Session
from agentserve.client.sync_turn import Turn
from agentserve.tools import Tool, tool

__all__ = [
    "AsyncBranch",
    "AsyncClient",
    "AsyncSession",
    "AsyncTurn",
    "BadReply",
    "BadRequest",
    "Branch",
    "Call",
    "Client",
    "ClientError",
    "Conflict",
    "ConnectionFailed",
    "ErrorTold",
    "Event",
    "Forbidden",
    "Message",
    "NotFound",
    "Other",
    "RateLimited",
    "Reasoning",
    "ReasoningDelta",
    "Receipt",
    "Resynced",
    "Retry",
    "ServerFailed",
    "Session",
    "SessionInfo",
    "StatusError",
    "StreamLost",
    "TextDelta",
    "TooLarge",
    "Tool",
    "ToolCalled",
    "ToolReturned",
    "Turn",
    "TurnEnded",
    "TurnFailed",
    "TurnResult",
    "TurnStarted",
    "Unauthorized",
    "Unprocessable",
    "Usage",
    "tool",
]
