"""A LangGraph agent on AgentServe: python examples/langgraph_agent.py [URL].

Start a server first (`make serve`). The graph is LangGraph's own; only `base_url` says where the model
is. A model of 135 million parameters calls no tool by itself, so the first call is forced; with a larger
one drop `forced`.
"""

from __future__ import annotations

import sys
from typing import Any

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from openai import APIConnectionError

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def main() -> None:
    model = ChatOpenAI(
        model="smollm2-135m", base_url=f"{URL}/v1", api_key="none", temperature=0, max_tokens=80
    )
    forced = model.bind_tools([add], tool_choice="add")
    free = model.bind_tools([add], tool_choice="none")

    def think(state: MessagesState) -> dict[str, Any]:
        answered = any(message.type == "tool" for message in state["messages"])
        return {"messages": [(free if answered else forced).invoke(state["messages"])]}

    def after(state: MessagesState) -> str:
        return "tools" if getattr(state["messages"][-1], "tool_calls", None) else END

    graph = StateGraph(MessagesState)
    graph.add_node("think", think)
    graph.add_node("tools", ToolNode([add]))
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", after)
    graph.add_edge("tools", "think")
    try:
        result = graph.compile().invoke({"messages": [("user", "What is 2 plus 3?")]})
    except APIConnectionError:
        sys.exit(f"No server at {URL}: start one first (make serve), or name its URL.")
    for message in result["messages"]:
        print(f"{message.type}: {message.content or getattr(message, 'tool_calls', '')}")


if __name__ == "__main__":
    main()
