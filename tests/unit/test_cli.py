"""The command line: quick help, clear errors, a paste-ready request, and a chat that keeps its session."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

import agentserve
import kernels.cpu
from agentserve.bench.report import Row
from agentserve.bench.speed import kept
from agentserve.cli import packages
from agentserve.cli.bench import show
from agentserve.cli.chat import ChatError, Conversation, events, first_model
from agentserve.cli.doctor import cpu_features, dot_products, findings
from agentserve.cli.main import COMMANDS, app
from agentserve.cli.serve import ready_text
from agentserve.config import load
from agentserve.messages import Hello
from agentserve.server.launch import Ready
from kernels.cpu import BuildError
from tests.hello import made_up_hello

ROOT = Path(agentserve.__file__).parent.parent


def command(*arguments: str, path: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (path, str(ROOT))))}
    return subprocess.run(
        [sys.executable, "-m", "agentserve", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        cwd="/",
    )


def test_help_needs_no_torch() -> None:
    source = (
        "import sys\nfrom agentserve.cli.main import app\n"
        "heavy = {'torch', 'uvicorn', 'transformers', 'xgrammar', 'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", source], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str) -> None:
    result = CliRunner().invoke(app, [name, "--help"])
    assert result.exit_code == 0
    assert result.output.count("\n") > 5


def test_version() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"agentserve {agentserve.__version__}\n"


def test_bench_says_in_which_numbers_it_ran(capsys: pytest.CaptureFixture[str]) -> None:
    said = kept(made_up_hello(weights="Q4_1/Q8_0", activations="int8", kv_dtype="fp16"))
    assert said == "bf16, weights Q4_1/Q8_0, activations int8, KV fp16, reference kernels"
    show([Row("decode", 2.0, "ms/step", 1.0, "memory")], [said])
    shown = capsys.readouterr().out.splitlines()
    assert "50%" in shown[-2]
    assert shown[-1] == said


def test_bench_expands_weights_unless_told_otherwise() -> None:
    result = command("bench", "--activations", "int8")
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert 'needs weights "stored", got "expanded"' in result.stderr


def test_the_version_is_the_distributions() -> None:
    assert f'version = "{agentserve.__version__}"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--host", "0.0.0.0"), "agentserve: host 0.0.0.0 can be reached from other machines"),
        (("--max-num-seqs", "many"), 'agentserve: --max-num-seqs: expected an integer ≥ 1, got "many"'),
        (("--config", "/nowhere.toml"), "agentserve: /nowhere.toml: No such file or directory"),
    ],
)
def test_a_bad_flag_stops_serve_with_one_line(arguments: tuple[str, ...], error: str) -> None:
    result = command("serve", *arguments)
    assert result.returncode == 1
    assert result.stderr.startswith(error)
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_serve_refuses_somebody_elses_kernels(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    result = command("serve", path=str(tmp_path))
    assert result.returncode == 1
    assert str(tmp_path / "kernels") in result.stderr
    assert "environment of its own" in result.stderr
    assert result.stderr.count("\n") == 1


def test_our_own_kernels_are_recognised() -> None:
    assert packages.foreign_kernels() is None


def test_overwritten_kernels_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Distribution:
        version = "0.9"

        def locate_file(self, name: str) -> Path:
            return ROOT / name

    monkeypatch.setattr(packages.importlib.metadata, "distribution", lambda name: Distribution())
    assert "kernels 0.9 has overwritten" in str(packages.foreign_kernels())


def test_doctor_names_what_matters() -> None:
    names = [finding.name for finding in findings()]
    for name in ("python", "torch", "cpu", "memory", "kernels", "backend"):
        assert name in names


@pytest.mark.parametrize(
    ("features", "used", "text"),
    [
        ((), (), "none: --activations int8 is computed with other instructions, and gains little"),
        (("avx2", "avx512_vnni", "avx_vnni"), ("avx512_vnni",), "avx512_vnni (used), avx_vnni (not used)"),
        (("asimd", "asimddp"), (), "asimddp (not used)"),
    ],
)
def test_doctor_knows_8_bit_dot_products(features: tuple[str, ...], used: tuple[str, ...], text: str) -> None:
    assert dot_products(features, used) == text


def test_doctor_reads_both_kinds_of_processor(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nflags : fpu avx2 avx512_vnni\nflags : avx2\n")
    assert cpu_features(info) == ["avx2", "avx512_vnni"]
    info.write_text("processor : 0\nFeatures : fp asimd asimddp sve\n")
    assert cpu_features(info) == ["asimd", "asimddp"]
    assert cpu_features(tmp_path / "absent") == []


def test_doctor_says_which_backend_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {finding.name: finding.value for finding in findings()}
    assert found["backend"].startswith(("cpu-", "reference, several times slower: "))
    assert "(" in found["backend"] or ":" in found["backend"]
    assert "8-bit dot" in found

    def no_compiler() -> None:
        raise BuildError("no C++ compiler found (g++ or c++ from GCC)")

    monkeypatch.setattr(kernels.cpu, "find_toolchain", no_compiler)
    found = {finding.name: finding.value for finding in findings()}
    assert found["backend"] == (
        "reference, several times slower: no C++ compiler found (g++ or c++ from GCC)"
    )


def hello() -> Hello:
    return made_up_hello(max_model_len=8192, pages=1000, kv_bytes=2**28, parameters=135_000_000)


def test_the_ready_text_can_be_pasted_into_a_shell() -> None:
    text = ready_text(Ready("http://127.0.0.1:8000", "it's", 1, hello()), load({"api_key": ["secret"]}))
    assert "secret" not in text
    assert "256 MiB = 1000 pages of 16 tokens per worker (from free memory" in text
    request = text.split("Try:\n", 1)[1]
    shown = subprocess.run(
        ["sh", "-c", f'curl() {{ for a; do echo "$a"; done; }}; {request}'],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert shown[0] == "http://127.0.0.1:8000/v1/chat/completions"
    assert json.loads(shown[-1])["model"] == "it's"
    assert "authorization: Bearer <one of your keys>" in shown


@pytest.mark.parametrize(
    ("fields", "lines"),
    [
        (
            {},
            (
                "1M parameters, bf16 (200 MiB), context",
                "worker(s) on cpu: reference (made up)",
                "sets it), bf16",
            ),
        ),
        (
            {"weights": "Q4_1/Q8_0", "kv_dtype": "int8", "backend_reason": "cpu-avx2 (why)"},
            (
                "Q4_1/Q8_0 blocks as stored, bf16 (200 MiB), context",
                "worker(s) on cpu: cpu-avx2 (why)",
                ", int8",
            ),
        ),
        (
            {"weights": "Q4_K", "activations": "int8", "dtype": "fp32"},
            ("Q4_K blocks as stored, fp32, 8-bit activations (200 MiB), context",),
        ),
    ],
)
def test_the_ready_text_names_the_numbers(fields: dict[str, str], lines: tuple[str, ...]) -> None:
    shown = made_up_hello(parameters=1_000_000, **fields)
    text = ready_text(Ready("http://127.0.0.1:8000", "m", 1, shown), load({}))
    for line in lines:
        assert line in text


def test_the_ready_text_names_the_tiers() -> None:
    ready = Ready("http://127.0.0.1:8000", "m", 1, hello())
    assert "below it" not in ready_text(ready, load({"data_dir": "d"}))
    text = ready_text(ready, load({"host_kv": "2GiB"}))
    assert "  below it 2.0 GiB of host memory per worker; priced\n" in text
    text = ready_text(
        ready, load({"host_kv": "2GiB", "disk_kv": "20GiB", "data_dir": "d", "tier_policy": "lru"})
    )
    assert "  below it 2.0 GiB of host memory per worker, then 20.0 GiB in d; lru\n" in text
    text = ready_text(ready, load({"disk_kv": "20GiB", "data_dir": "d"}))
    assert "  below it 20.0 GiB in d; priced\n" in text


def stream(*pieces: str, error: str = "") -> bytes:
    lines = [": keep-alive", ""]
    lines += [f"data: {json.dumps({'choices': [{'delta': {'content': piece}}]})}\n" for piece in pieces]
    if error:
        lines.append(f"data: {json.dumps({'error': {'message': error}})}\n")
    else:
        lines += [f"data: {json.dumps({'choices': [], 'usage': {'prompt_tokens': 4}})}\n", "data: [DONE]\n"]
    return "\n".join(lines).encode()


def test_a_conversation_keeps_its_session_and_history() -> None:
    seen: list[httpx.Request] = []

    def reply(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, content=stream("a", "ü\u2028"), headers={"x-session-id": "s1"})

    client = httpx.Client(base_url="http://server", transport=httpx.MockTransport(reply))
    conversation = Conversation(client, "m", max_tokens=5, temperature=0.0)
    assert "".join(conversation.say("hi")) == "aü\u2028"
    list(conversation.say("more"))
    assert "x-session-id" not in seen[0].headers
    assert seen[1].headers["x-session-id"] == "s1"
    body = json.loads(seen[1].content)
    assert [message["content"] for message in body["messages"]] == ["hi", "aü\u2028", "more"]
    assert (body["max_tokens"], body["temperature"]) == (5, 0.0)
    assert conversation.usage == {"prompt_tokens": 4}


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (httpx.Response(400, json={"error": {"message": "too long"}}), "too long"),
        (httpx.Response(502, text="<html>"), "HTTP 502: <html>"),
        (httpx.Response(200, content=stream("a", error="engine failed")), "engine failed"),
    ],
)
def test_a_failed_message_leaves_the_history_as_it_was(response: httpx.Response, message: str) -> None:
    client = httpx.Client(base_url="http://server", transport=httpx.MockTransport(lambda _: response))
    conversation = Conversation(client, "m")
    with pytest.raises(ChatError, match=message):
        list(conversation.say("hi"))
    assert conversation.history == []


def test_a_server_without_models_is_said() -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json={"data": []}))
    with pytest.raises(ChatError, match="no model"):
        first_model(httpx.Client(base_url="http://server", transport=transport))


def test_events_end_at_done() -> None:
    assert list(events(iter(['data: {"a":1}', "", "event: x", "data:[DONE]", 'data: {"b":1}']))) == [{"a": 1}]


def test_chat_without_a_server_is_one_line() -> None:
    result = command("chat", "hi", "--url", "http://127.0.0.1:9")
    assert result.returncode == 1
    assert result.stderr.startswith("agentserve: cannot talk to http://127.0.0.1:9")
