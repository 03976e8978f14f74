"""`agentserve serve`: start the server."""

from __future__ import annotations

import logging
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from agentserve.cli.output import fail
from agentserve.cli.packages import foreign_kernels
from agentserve.config import ServeConfig, StorageConfig, has_keys, load
from agentserve.core.scheduling.settings import DEFAULT_POLICY
from agentserve.values import show_size

if TYPE_CHECKING:
    from agentserve.messages import Hello
    from agentserve.server.launch import Ready


# Values are texts here and are read by `agentserve.config`, so that flags and file share one reader.
def serve(
    *,
    model: Annotated[
        str | None,
        typer.Option(
            help="Folder, Hugging Face id, .gguf file, or smollm2-135m.", show_default="smollm2-135m"
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="What clients call the model; may be repeated.")
    ] = None,
    host: Annotated[str | None, typer.Option(show_default="127.0.0.1")] = None,
    port: Annotated[str | None, typer.Option(help="0 picks a free one.", show_default="8000")] = None,
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32.", show_default="bf16")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N.", show_default="cpu")] = None,
    weights: Annotated[
        str | None,
        typer.Option(help="Quantised weights: as stored, or expanded to dtype.", show_default="stored"),
    ] = None,
    activations: Annotated[
        str | None,
        typer.Option(help="float, or int8 for products with blocks.", show_default="float"),
    ] = None,
    kv_dtype: Annotated[
        str | None, typer.Option(help="auto, bf16, fp16, fp32 or int8.", show_default="the model's")
    ] = None,
    device_kv: Annotated[
        str | None,
        typer.Option(help="KV pool per worker, e.g. 512MiB.", show_default="from free memory"),
    ] = None,
    host_kv: Annotated[
        str | None, typer.Option(help="Host memory for KV per worker, e.g. 2GiB.", show_default="0: none")
    ] = None,
    disk_kv: Annotated[
        str | None, typer.Option(help="Disk for KV, all workers together.", show_default="0: none")
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Keep sessions and KV here, across restarts.", show_default="not kept"),
    ] = None,
    tier_policy: Annotated[
        str | None,
        typer.Option(help="What decides where KV waits: priced, lru, ...", show_default="priced"),
    ] = None,
    scheduling: Annotated[
        str | None,
        typer.Option(
            help="The order in which turns run: see `agentserve doctor`.", show_default=DEFAULT_POLICY
        ),
    ] = None,
    page_size: Annotated[str | None, typer.Option(help="Token slots per page.", show_default="16")] = None,
    max_num_seqs: Annotated[str | None, typer.Option(help="Turns per step.", show_default="64")] = None,
    max_batched_tokens: Annotated[
        str | None, typer.Option(help="Tokens per step.", show_default="512")
    ] = None,
    max_model_len: Annotated[
        str | None, typer.Option(help="Longest context.", show_default="the model's")
    ] = None,
    max_step_ms: Annotated[
        str | None,
        typer.Option(help="Longest step, as predicted from measured ones.", show_default="no limit"),
    ] = None,
    workers: Annotated[str | None, typer.Option(help="Engine processes.", show_default="1")] = None,
    threads: Annotated[
        str | None, typer.Option(help="Kernel threads per worker.", show_default="cores / workers")
    ] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(help="A key clients must send; may be repeated.")
    ] = None,
    admin_key: Annotated[
        list[str] | None, typer.Option(help="A key for metrics and the like; may be repeated.")
    ] = None,
    chat_template: Annotated[Path | None, typer.Option(help="A Jinja file instead of the model's.")] = None,
    tool_parser: Annotated[
        str | None, typer.Option(help="The form of the model's tool calls.", show_default="as its template")
    ] = None,
    reasoning_parser: Annotated[
        str | None, typer.Option(help="How it sets reasoning apart.", show_default="as its template")
    ] = None,
    steady_prompt: Annotated[
        bool,
        typer.Option("--steady-prompt", help="Tools stay in front of the first message (Mistral v3 to v11)."),
    ] = False,
    max_body: Annotated[str | None, typer.Option(help="Longest request body.", show_default="4MiB")] = None,
    force_usage: Annotated[bool, typer.Option("--force-usage", help="Add usage to every stream.")] = False,
    reasoning_field: Annotated[
        str | None,
        typer.Option(help="Where replies show reasoning: reasoning, reasoning_content.", show_default="both"),
    ] = None,
    drain_seconds: Annotated[
        str | None, typer.Option(help="How long turns may go on after SIGTERM.", show_default="30")
    ] = None,
    tool_wait_seconds: Annotated[
        str | None, typer.Option(help="How long a session waits for its tools.", show_default="3600")
    ] = None,
    session_ttl_seconds: Annotated[
        str | None, typer.Option(help="After that an idle session is forgotten.", show_default="86400")
    ] = None,
    keep_responses: Annotated[
        str | None, typer.Option(help="Room for responses that are stored.", show_default="256MiB")
    ] = None,
    response_ttl_days: Annotated[
        str | None, typer.Option(help="After that a stored response is gone.", show_default="30")
    ] = None,
    tools: Annotated[
        list[str] | None,
        typer.Option(help="A module whose @agentserve.tool functions agents may call; may be repeated."),
    ] = None,
    private_host: Annotated[
        list[str] | None,
        typer.Option(help="A host that tools may be reached at though it is private; may be repeated."),
    ] = None,
    allow_private_callbacks: Annotated[
        bool,
        typer.Option("--allow-private-callbacks", help="Webhooks may go to private addresses, by http too."),
    ] = False,
    callback_url: Annotated[
        str | None,
        typer.Option(help="Where webhooks' receivers reach this server.", show_default="where it listens"),
    ] = None,
    hang_seconds: Annotated[
        str | None, typer.Option(help="A worker silent for so long is replaced.", show_default="120")
    ] = None,
    overlap: Annotated[
        bool | None,
        typer.Option(
            "--overlap/--no-overlap",
            help="Deliver results while the next step computes.",
            show_default="on devices",
        ),
    ] = None,
    record: Annotated[Path | None, typer.Option(help="Write the engine's ordered log here.")] = None,
    step_model: Annotated[
        Path | None,
        typer.Option(help="What steps cost here, by `agentserve fit`.", show_default="measured if needed"),
    ] = None,
    recording: Annotated[
        Path | None,
        typer.Option(help="A folder: write down what became of requests and iterations.", show_default="off"),
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(help="debug, info, warning or error.", show_default="info")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file; flags override it.")] = None,
) -> None:
    """Serve a model over the OpenAI API (and the session API) until SIGTERM."""
    flags = {name: value for name, value in locals().items() if name != "config"}
    flags["force_usage"] = force_usage or None  # not given leaves the file its say
    flags["allow_private_callbacks"] = allow_private_callbacks or None
    flags["steady_prompt"] = steady_prompt or None
    settings = load(flags, config)
    foreign = foreign_kernels()
    if foreign is not None:
        fail(foreign)
    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s api %(levelname)s %(message)s")
    if settings.log_level == "info":
        logging.getLogger("uvicorn").setLevel(logging.WARNING)  # its start-up talk says nothing of ours
    _launch(settings)


def _launch(settings: ServeConfig) -> None:
    from agentserve.server.launch import LaunchError, run
    from agentserve.server.wiring import prepare_app

    try:
        run(settings, prepare_app, lambda ready: typer.echo(ready_text(ready, settings)))
    except LaunchError as error:
        fail(str(error))


def ready_text(ready: Ready, settings: ServeConfig) -> str:
    """What to print when the port is open: the facts, and a request to paste."""
    hello = ready.hello
    sized = "" if settings.engine.device_kv else " (from free memory; --device-kv sets it)"
    body = {"model": ready.model, "messages": [{"role": "user", "content": "Say hello."}]}
    keyed = settings.api_keys or has_keys(settings.storage)
    request = [
        f"curl {ready.url}/v1/chat/completions",
        "-H 'content-type: application/json'",
        *(["-H 'authorization: Bearer <one of your keys>'"] if keyed else []),
        f"-d {shlex.quote(msgspec.json.encode(body).decode())}",
    ]
    lines = [
        f"AgentServe is ready on {ready.url}",
        f"  model    {ready.model}, {hello.parameters / 1e6:.0f}M parameters, {numbers(hello)} "
        f"({show_size(hello.weight_bytes)}), context {hello.max_model_len}",
        f"  engine   {ready.workers} worker(s) on {hello.device}: {hello.backend_reason}",
        f"  KV pool  {show_size(hello.kv_bytes)} = {hello.pages} pages of {hello.page_size} tokens"
        f" per worker{sized}, {hello.kv_dtype}",
        *_tiers(settings.storage),
        "",
        "Try:",
        "  " + " \\\n    ".join(request),
    ]
    return "\n".join(lines)


def _tiers(storage: StorageConfig) -> list[str]:
    below = []
    if storage.host_kv:
        below.append(f"{show_size(storage.host_kv)} of host memory per worker")
    if storage.disk_kv:
        below.append(f"{show_size(storage.disk_kv)} in {storage.data_dir}")
    return [f"  below it {', then '.join(below)}; {storage.tier_policy}"] if below else []


def numbers(hello: Hello) -> str:
    """In which numbers the model computes."""
    if hello.weights == "expanded":
        return hello.dtype
    rounded = ", 8-bit activations" if hello.activations == "int8" else ""
    return f"{hello.weights} blocks as stored, {hello.dtype}{rounded}"
