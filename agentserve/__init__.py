"""AgentServe: an LLM inference server whose unit is the agent's session, not the request."""

from agentserve.tools import Tool, tool

__all__ = ["Tool", "tool"]
__version__ = "2026.12.0"
