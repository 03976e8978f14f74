"""Messages bodies as the chat requests that ask the same."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from agentserve.server.errors import ApiError
from agentserve.server.http.anthropic.asked import asked
from agentserve.server.http.anthropic.schemas import CountRequest
from agentserve.server.http.anthropic.signature import hidden, sign
from tests.anthropic_bodies import NONCE, TOOL, USER, ask, chat_of, refused, result, text, use


def test_a_text_is_a_text_as_string_and_as_block() -> None:
    assert chat_of(USER) == chat_of({"role": "user", "content": [text("hi")]}) == [USER]
    assert chat_of({"role": "user", "content": [text("a"), text("b")]})[0]["content"] == [
        text("a"),
        text("b"),
    ]


@pytest.mark.parametrize(
    ("system", "said"),
    [
        ("Be brief.", "Be brief."),
        ([text("Be brief.")], "Be brief."),
        ([text(NONCE), text("Be brief.")], "Be brief."),
        (f"{NONCE}\nBe brief.", "Be brief."),
        ([text(f"{NONCE}\nBe"), text("brief.")], [text("Be"), text("brief.")]),
        ([text("Be brief. " + NONCE)], "Be brief. " + NONCE),  # only where a text begins with it
    ],
)
def test_system_text_comes_first_and_without_the_nonce(system: Any, said: Any) -> None:
    assert chat_of(system=system) == [{"role": "system", "content": said}, USER]


@pytest.mark.parametrize("system", ["", [], NONCE, [text(NONCE)], [text(NONCE), text("")]])
def test_a_system_that_says_nothing_is_none(system: Any) -> None:
    assert chat_of(system=system) == [USER]


def test_system_turns_stay_where_they_are() -> None:
    said = chat_of(USER, {"role": "system", "content": [text("A reminder.")]}, USER)
    assert [message["role"] for message in said] == ["user", "system", "user"]


def test_a_tool_round_trip() -> None:
    said = chat_of(
        USER,
        {
            "role": "assistant",
            "content": [text("Let me"), text(" see."), use("a", "c1", x=1), use("b", "c2")],
        },
        {"role": "user", "content": [text("Go on."), result("c2", [text("two")]), result("c1", "one")]},
    )
    assert said[1]["content"] == "Let me see."
    assert said[1]["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "a", "arguments": '{"x": 1}'}},
        {"id": "c2", "type": "function", "function": {"name": "b", "arguments": "{}"}},
    ]
    assert said[2:] == [
        {"role": "tool", "tool_call_id": "c2", "content": "two"},
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "user", "content": "Go on."},
    ]


@pytest.mark.parametrize(
    ("block", "content"),
    [
        (result("c"), ""),
        (result("c", ""), ""),
        (result("c", []), ""),
        (result("c", "no such file", is_error=True), "Error: no such file"),
        (result("c", "Error: no such file", is_error=True), "Error: no such file"),
        (
            result("c", "<tool_use_error>no</tool_use_error>", is_error=True),
            "<tool_use_error>no</tool_use_error>",
        ),
        (result("c", is_error=True), "Error"),
        (result("c", "fine", is_error=False), "fine"),
        (result("c", [{"type": "tool_reference", "tool_name": "grep"}]), "grep"),
    ],
)
def test_results(block: Any, content: str) -> None:
    said = chat_of(
        USER, {"role": "assistant", "content": [use("a", "c")]}, {"role": "user", "content": [block]}
    )
    assert said[2:] == [{"role": "tool", "tool_call_id": "c", "content": content}]


def test_turns_of_one_role_are_one_turn() -> None:
    said = chat_of(
        USER,
        {"role": "assistant", "content": "One "},
        {"role": "assistant", "content": [text("two."), use("a", "c1")]},
        {"role": "assistant", "content": [use("a", "c2")]},
        {"role": "user", "content": [result("c1", "1")]},
        {"role": "user", "content": [result("c2", "2"), text("So?")]},
        {"role": "user", "content": "Well?"},
    )
    assert [message["role"] for message in said] == ["user", "assistant", "tool", "tool", "user"]
    assert said[1]["content"] == "One two."
    assert len(said[1]["tool_calls"]) == 2
    assert said[4]["content"] == [text("So?"), text("Well?")]


def test_thinking_comes_back_as_reasoning_shown_or_hidden() -> None:
    shown = {"type": "thinking", "thinking": "Hm. ", "signature": sign("Hm. ", shown=True)}
    unseen = {"type": "thinking", "thinking": "", "signature": sign("Was?\ud800 ö", shown=False)}
    theirs = {"type": "thinking", "thinking": "Theirs.", "signature": "EqQBCgIYAhIM"}
    gone = {"type": "redacted_thinking", "data": "xyz"}
    said = chat_of(USER, {"role": "assistant", "content": [shown, unseen, theirs, gone, text("Yes.")]}, USER)
    assert said[1] == {
        "role": "assistant",
        "content": "Yes.",
        "reasoning_content": "Hm. Was?\ud800 öTheirs.",
    }


@pytest.mark.parametrize("signature", ["", "as1h.", "as1h.!!!", "as1h.YQ", "as1h._w==", "as1s.YWFh", "Eq"])
def test_a_signature_of_another_hides_nothing(signature: str) -> None:
    assert hidden(signature) == ""


def test_documents_of_text_are_text() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "The body."}
    plain = {"type": "document", "source": source, "title": "T", "context": "C"}
    parts = {"type": "document", "source": {"type": "content", "content": [text("a"), text("b")]}}
    found = {"type": "search_result", "source": "http://x", "title": "T", "content": [text("found")]}
    said = chat_of({"role": "user", "content": [plain, parts, found]})
    assert [part["text"] for part in said[0]["content"]] == ["T\nC\nThe body.", "a\nb", "T\nhttp://x\nfound"]


@pytest.mark.parametrize(
    ("block", "place"),
    [
        ({"type": "image", "source": {"type": "url", "url": "u"}}, "messages[1].content[1].type"),
        ({"type": "document", "source": {"type": "base64", "data": "x"}}, "messages[1].content[1].source"),
        ({"type": "document"}, "messages[1].content[1].source"),
        ({"type": "text"}, "messages[1].content[1].text"),
        ({"type": "hologram"}, "messages[1].content[1].type"),
        (result("c", [{"type": "hologram"}]), "messages[1].content[1].content[0].type"),
        (
            {"type": "search_result", "content": [{"type": "image"}]},
            "messages[1].content[1].content[0].type",
        ),
        (result("c", {"type": "text"}), "messages[1].content[1].content"),
        (result("c", [{"text": "t"}]), "messages[1].content[1].content"),
    ],
)
def test_what_is_no_text_is_refused_by_place(block: Any, place: str) -> None:
    error = refused({"role": "assistant", "content": "x"}, {"role": "user", "content": [text("a"), block]})
    assert error.param == place
    assert error.message.startswith(place)


@pytest.mark.parametrize(
    ("block", "told"),
    [
        ({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBO"}}, "image"),
        ({"type": "document", "source": {"type": "base64", "data": "JVBERi0"}}, "document"),
        ({"type": "document"}, "document"),
    ],
)
def test_what_a_tool_returned_and_is_no_text_is_told_of(block: Any, told: str) -> None:
    """A screenshot that was read once is in every later request."""
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    answered = {"role": "user", "content": [result("c", [text("Here:"), block])]}
    *_, message = chat_of(USER, {"role": "assistant", "content": [use]}, answered)
    assert [part["text"] for part in message["content"]] == ["Here:", f"[{told}: not readable by this model]"]


def test_a_document_of_text_in_a_result_is_its_text() -> None:
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    paper = {"type": "document", "source": {"type": "text", "data": "The body."}}
    answered = {"role": "user", "content": [result("c", [paper])]}
    assert chat_of(USER, {"role": "assistant", "content": [use]}, answered)[-1]["content"] == "The body."


def test_what_others_servers_ran_is_left_out() -> None:
    theirs = [{"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}]
    theirs += [
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"encrypted_content": "x"}]}
    ]
    said = chat_of(USER, {"role": "assistant", "content": [*theirs, text("Found.")]}, USER)
    assert said[1] == {"role": "assistant", "content": "Found."}


def test_settings() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    ours = ask(
        stop_sequences=["END"],
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        stream=True,
        thinking={"type": "enabled", "budget_tokens": 2048, "display": "omitted"},
        output_config={"effort": "xhigh", "format": {"type": "json_schema", "schema": schema}},
        metadata={"user_id": "u"},
        container=None,
        context_management={"edits": []},
        service_tier="auto",
        session_id="s",
    )
    chat = ours.chat
    assert (chat.max_completion_tokens, chat.stop, chat.temperature) == (9, ["END"], 0.5)
    assert (chat.top_p, chat.top_k, chat.stream, chat.session_id) == (0.9, 40, True, "s")
    assert chat.chat_template_kwargs == {
        "enable_thinking": True,
        "thinking": True,
        "reasoning_effort": "high",
    }
    assert chat.response_format is not None
    assert chat.response_format.json_schema is not None
    assert chat.response_format.json_schema.schema == schema
    assert not ours.shows_thinking
    assert ask().chat.chat_template_kwargs is None
    assert ask(thinking={"type": "disabled"}).chat.chat_template_kwargs == {
        "enable_thinking": False,
        "thinking": False,
    }
    beta = ask(output_format={"type": "json_schema", "schema": schema}).chat.response_format
    assert beta == chat.response_format


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"thinking": {"type": "loud"}}, "thinking.type"),
        ({"output_config": {"effort": "some"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ],
)
def test_settings_that_are_none(fields: Any, place: str) -> None:
    assert refused(**fields).param == place


def test_the_answer_goes_on_from_a_last_turn_of_the_assistant() -> None:
    assert ask(USER, {"role": "assistant", "content": "The best is ("}).chat.continue_final_message
    assert ask(USER, {"role": "assistant", "content": "x"}, USER).chat.continue_final_message is None
    assert refused(USER, {"role": "assistant", "content": [use("a", "c")]}).code == "missing_tool_result"


@pytest.mark.parametrize("role", ["tool", "developer", ""])
def test_roles_that_are_none(role: str) -> None:
    assert refused(USER, {"role": role, "content": "x"}).param == "messages[1].role"


def test_without_messages_there_is_nothing_to_ask() -> None:
    body = {"model": "tiny", "messages": [], "system": "Be brief."}
    with pytest.raises(ApiError, match="at least one message"):
        asked(msgspec.convert(body, CountRequest))


def test_errors_come_back_in_the_words_of_the_body() -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}
    ours = ask(
        USER,
        USER,
        {"role": "assistant", "content": [use("a", "c1")]},
        {"role": "user", "content": [text("x"), result("c2", "y")]},
        system=[text(NONCE), text("Be brief.")],
        tools=[search, TOOL],
    )

    def renamed(message: str, param: str | None) -> tuple[str, str | None]:
        told = ours.renamed(ApiError(message, param=param, code="c", details={"n": 1}, headers={"h": "v"}))
        assert (told.status, told.code, told.details, told.headers) == (400, "c", {"n": 1}, {"h": "v"})
        return told.message, told.param

    there = "messages[3].content[1].tool_use_id"
    assert renamed("messages[3].tool_call_id: unknown", "messages[3].tool_call_id") == (
        f"{there}: unknown",
        there,
    )
    assert renamed("messages[2].tool_calls[0].id: bad", None)[0] == "messages[2]: bad"
    assert renamed("messages[0].content[1]: bad", None)[0] == "system: bad"
    assert renamed("messages[9]: bad", "messages[9]") == ("messages[9]: bad", "messages[9]")
    assert renamed("tools[0].function.parameters: bad", "tools[0].function.parameters") == (
        "tools[1].input_schema: bad",
        "tools[1].input_schema",
    )
    assert renamed("tools[0].function.name: bad", None)[0] == "tools[1].name: bad"
    assert renamed("stop: at most 4", "stop") == ("stop_sequences: at most 4", "stop_sequences")
    assert renamed("stop and go", None)[0] == "stop and go"
    assert renamed("response_format: bad", "response_format")[1] == "output_config.format"
    assert renamed("max_tokens: must be at least 1", "max_tokens")[1] == "max_tokens"


# --- tools that are offered later -------------------------------------------------------------


def test_a_summary_is_text() -> None:
    summary = {"type": "compaction", "content": "They talked."}
    said = chat_of({"role": "assistant", "content": [summary, {"type": "compaction"}]}, USER)
    assert said[0]["content"] == "They talked."
