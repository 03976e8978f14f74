"""Agent traces in real time: on the engine in this process, or against any OpenAI-compatible server."""
