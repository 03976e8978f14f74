"""Health, models, metrics, tokenisation, cache reset."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from agentserve.metrics import CONTENT_TYPE
from agentserve.server.engine_port import FleetHealth
from agentserve.server.errors import ApiError, json_response
from agentserve.server.http import history, sampling
from agentserve.server.http.anthropic.errors import speaks
from agentserve.server.http.anthropic.models import anthropic_model
from agentserve.server.http.callers import caller_in, tenant_of
from agentserve.server.http.chat_request import render, template_of
from agentserve.server.http.choice_parts import token_text
from agentserve.server.http.context import ServerContext, context_of
from agentserve.server.http.reading import read_body
from agentserve.server.http.residency import tiers_health
from agentserve.server.http.schemas import ChatRequest, DetokenizeRequest, TokenizeRequest, decode
from agentserve.server.limits import check_text
from agentserve.server.sessions.journal import Journal
from agentserve.server.sessions.request_log import SERIES as REQUESTS
from agentserve.server.text_port import JsonObject, Tokenizer

_SHOWN = 8  # damages that /health tells of, the latest


async def health(request: Request) -> Response:
    """200 while a worker can be counted on, 503 otherwise; says what runs.

    `degraded` lists what is not as it should be. Where that holds up requests, or has some refused, the
    status is "degraded" too: with a disk that has to keep sessions and fails, chat turns are refused.
    """
    context = context_of(request)
    caller = caller_in(request.scope)
    if caller is None or not caller.admin:
        told, status = _outline(context)
        return json_response(told, status=status)
    alive, workers = context.engine.alive, context.engine.health()
    if not workers.serving:
        reply = {"status": "unavailable", "workers": alive, "degraded": _worker_faults(context, workers)}
        return json_response(reply, status=503)
    hello = context.engine.hello
    tiers = tiers_health(context)
    faults = _worker_faults(context, workers) + _sessions_fault(context.journal)
    faults += context.responses.faults() + _agents_fault(context)
    faults += context.hooks.faults()
    return json_response(
        {
            "status": "degraded" if faults else "ok",
            "degraded": faults + _tier_faults(tiers),
            "workers": alive,
            "backend": hello.backend,
            "device": hello.device,
            "dtype": hello.dtype,
            "weights": hello.weights,
            "activations": hello.activations,
            "kv_dtype": hello.kv_dtype,
            "model": context.options.model,
            "max_model_len": hello.max_model_len,
            "page_size": hello.page_size,
            "pages": hello.pages,
            "kv_bytes": hello.kv_bytes,
            "tiers": tiers,
            **_storage(context.journal),
            **context.responses.health(),
            **context.hooks.health(),
        }
    )


def _outline(context: ServerContext) -> tuple[JsonObject, int]:
    """For those who do not run the server: whether it serves, and what. No use of it shows."""
    if not context.engine.health().serving:
        return {"status": "unavailable"}, 503
    faults = _sessions_fault(context.journal) + context.responses.faults() + _agents_fault(context)
    faults += context.hooks.faults() + _worker_faults(context, context.engine.health())
    hello = context.engine.hello
    told: JsonObject = {
        "status": "degraded" if faults else "ok",
        "degraded": [{"part": fault["part"]} for fault in faults],
        "model": context.options.model,
        "max_model_len": hello.max_model_len,
    }
    return told, 200


def _agents_fault(context: ServerContext) -> list[JsonObject]:
    """Why turns of agents are refused."""
    failure = context.agents.shelf.failure
    if failure is None:
        return []
    return [{"part": "agents_disk", "reason": failure.reason, "since": round(failure.since, 3)}]


def _worker_faults(context: ServerContext, workers: FleetHealth) -> list[JsonObject]:
    now = context.clock.now()
    faults = [
        {
            "part": f"worker {silence.worker}",
            "reason": f"it has said nothing for {now - silence.since:.0f} s",
            "since": round(context.unix(silence.since), 3),
        }
        for silence in workers.silent
    ]
    if (alive := context.engine.alive) < workers.places:
        faults.append({"part": "workers", "reason": f"{alive} of {workers.places} run", "since": None})
    return faults


def _sessions_fault(journal: Journal | None) -> list[JsonObject]:
    failure = journal.failure if journal is not None else None
    if failure is None:
        return []
    return [{"part": "sessions_disk", "reason": failure.reason, "since": round(failure.since, 3)}]


def _tier_faults(tiers: JsonObject) -> list[JsonObject]:
    """Who serves without a tier is slower, and nothing else."""
    return [
        {"part": f"tiers.{name}", "reason": tier["reason"], "since": tier["since"]}
        for name, tier in tiers.items()
        if isinstance(tier, dict) and tier["state"] != "ok"
    ]


def _storage(journal: Journal | None) -> JsonObject:
    """How the disk that keeps sessions does; nothing where they are not kept."""
    if journal is None:
        return {}
    failure = journal.failure
    told: JsonObject = {"state": "ok", "skipped": journal.skipped}
    if failure is not None:
        journal.retry()  # the next to look may see it well
        told |= {"state": "failing", "since": round(failure.since, 3), "reason": failure.reason}
    if journal.damages:
        told["damages"] = [
            {"reason": damage.reason, "kept": damage.kept, "missing_records": damage.missing}
            for damage in journal.damages[-_SHOWN:]
        ]
    if kept := journal.kept_aside:
        told["damaged_files"] = kept  # of earlier starts too: they are the operator's to remove
    return {"sessions_disk": told}


async def ping(request: Request) -> Response:
    return json_response({})


async def version(request: Request) -> Response:
    return json_response({"version": context_of(request).options.version})


async def server_info(request: Request) -> Response:
    """What runs here; benchmark tools look here first to learn which server they talk to."""
    context = context_of(request)
    hello = context.engine.hello
    return json_response(
        {
            "server": "agentserve",
            "version": context.options.version,
            "model": context.options.model,
            "model_aliases": list(context.options.aliases),
            "uptime_seconds": round(context.clock.now() - context.clock_at_start, 3),
            "workers": context.engine.alive,
            "backend": hello.backend,
            "backend_reason": hello.backend_reason,
            "device": hello.device,
            "dtype": hello.dtype,
            "weights": hello.weights,
            "activations": hello.activations,
            "kv_dtype": hello.kv_dtype,
            "parameters": hello.parameters,
            "weight_bytes": hello.weight_bytes,
            "weights_digest": hello.weights_digest,
            "vocab_size": hello.vocab_size,
            "max_model_len": hello.max_model_len,
            "page_size": hello.page_size,
            "pages": hello.pages,
            "kv_bytes": hello.kv_bytes,
        }
    )


async def load(request: Request) -> Response:
    """How many turns run or wait, under vLLM's name."""
    views = (await context_of(request).engine.describe()).workers
    return json_response({"server_load": sum(view.running + view.waiting for view in views)})


async def models(request: Request) -> Response:
    """All names that the model goes by; in Anthropic's shape where the header `anthropic-version` asks."""
    context = context_of(request)
    if speaks(request.scope):
        found = [anthropic_model(context, name) for name in _names(context)]
        ends = {"first_id": found[0]["id"], "last_id": found[-1]["id"]}
        return json_response({"data": found, "has_more": False, **ends})
    return json_response({"object": "list", "data": [_model(context, name) for name in _names(context)]})


async def model(request: Request) -> Response:
    """One of these names."""
    context = context_of(request)
    name = request.path_params["name"]
    context.check_model(name)
    if speaks(request.scope):
        return json_response(anthropic_model(context, name))
    return json_response(_model(context, name))


def _names(context: ServerContext) -> list[str]:
    return [context.options.model, *context.options.aliases]


def _model(context: ServerContext, name: str) -> JsonObject:
    return {
        "id": name,
        "object": "model",
        "created": int(context.started),
        "owned_by": "agentserve",
        "root": context.options.model,
        "parent": None,
        "max_model_len": context.engine.hello.max_model_len,
    }


async def metrics(request: Request) -> Response:
    context = context_of(request)
    seen = await context.engine.describe()
    context.metrics.set_workers(context.engine.alive, seen.workers if context.engine.alive else ())
    context.metrics.set_silence(seen.ages, len(context.engine.health().silent))
    if (journal := context.journal) is not None:
        context.metrics.set_storage(
            failing=journal.failure is not None,
            skipped=journal.skipped,
            damages=len(journal.damages),
            missing=sum(damage.missing or 0 for damage in journal.damages),
            kept=journal.kept_aside,
        )
    context.metrics.requests.set_preemptions(view.preempted for view in seen.workers)
    if (lost := context.log.lost) is not None:
        context.metrics.requests.lost(REQUESTS, lost)
        context.metrics.requests.lost("iterations", sum(view.unrecorded for view in seen.workers))
    context.metrics.set_responses(context.responses.counts())
    context.metrics.set_webhooks(context.hooks.metrics())
    context.metrics.tenants.set(context.accounts.counts())
    context.metrics.tenants.set_promises(context.accounts.promises())
    context.metrics.set_sessions(context.directory.by_state(), context.directory.size_bytes)
    return Response(context.metrics.render(), media_type=CONTENT_TYPE)


async def reset_prefix_cache(request: Request) -> Response:
    return json_response({"success": await context_of(request).engine.reset_prefix_cache()})


async def tokenize(request: Request) -> Response:
    context = context_of(request)
    limits = context.options.limits
    fields = decode(await read_body(request, limits.body_bytes), TokenizeRequest, limits)
    tenant = tenant_of(request)
    context.check_model(fields.model)
    if (fields.prompt is None) == (fields.messages is None):
        raise ApiError("Give either prompt or messages.", param="prompt")
    if fields.prompt is not None:
        check_text([fields.prompt], limits, "prompt")
        plain = fields.add_special_tokens is False
        tokenizer = context.tokenizer.apart(tenant)
        encode = tokenizer.encode if plain else tokenizer.encode_completion
        ids = await context.off_loop(encode, fields.prompt)
    else:
        chat = ChatRequest(
            messages=fields.messages or [],
            tools=fields.tools,
            add_generation_prompt=fields.add_generation_prompt,
            continue_final_message=fields.continue_final_message,
            chat_template_kwargs=fields.chat_template_kwargs,
        )
        written = context.tool_parser.written
        messages = await context.off_loop(history.message_dicts, chat.messages, limits, written=written)
        tools = history.tool_dicts(chat.tools, limits)
        prompt = await context.off_loop(render, template_of(context, tenant), chat, messages, tools)
        ids = prompt.tolist()
    reply: JsonObject = {
        "count": len(ids),
        "max_model_len": context.engine.hello.max_model_len,
        "tokens": ids,
        "token_strs": None,
    }
    if fields.return_token_strs:
        reply["token_strs"] = await context.off_loop(_token_texts, context.tokenizer, ids)
    return json_response(reply)


def _token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    return [token_text(tokenizer, token) for token in ids]


async def detokenize(request: Request) -> Response:
    context = context_of(request)
    limits = context.options.limits
    fields = decode(await read_body(request, limits.body_bytes), DetokenizeRequest, limits)
    context.check_model(fields.model)
    facts = context.facts
    if len(fields.tokens) > facts.max_model_len:
        raise ApiError(f"tokens: at most {facts.max_model_len}, got {len(fields.tokens)}", param="tokens")
    await context.off_loop(sampling.token_ids, "tokens", fields.tokens, facts.vocab_size)
    text = await context.off_loop(context.tokenizer.decode, fields.tokens, skip_control=False)
    return json_response({"prompt": text})
