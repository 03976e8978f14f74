"""AgentServe: an LLM inference server whose unit is the agent's session, not the request."""

__version__ = "2026.12.0"
