"""POST /v1/responses, and what is near it: counting a prompt, and what is not there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from agentserve.server.errors import ApiError, json_response
from agentserve.server.http.ahead_of_turn import prompt_of
from agentserve.server.http.callers import tenant_of
from agentserve.server.http.context import ServerContext, context_of
from agentserve.server.http.idempotency import share
from agentserve.server.http.names import SESSION_HEADER, set_request_id
from agentserve.server.http.reading import read_body
from agentserve.server.http.responses.events import event_frame
from agentserve.server.http.responses.following import follow, follow_live, found
from agentserve.server.http.responses.job import TOO_LONG, Job, check_turn, turn_job, warming_job
from agentserve.server.http.responses.live import EVENT_SECONDS, Live
from agentserve.server.http.responses.making import Making
from agentserve.server.http.responses.plan import Plan, planned
from agentserve.server.http.responses.rounds import Rounds
from agentserve.server.http.responses.schemas import ResponsesRequest
from agentserve.server.http.responses.shelf import Kept
from agentserve.server.http.schemas import decode
from agentserve.server.http.sse import DONE, KEEP_ALIVE, StreamForm, unless_gone
from agentserve.server.http.streaming import open_stream
from agentserve.server.sessions.transcript import write_json
from agentserve.server.text_port import JsonObject
from agentserve.server.webhooks.payloads import RESPONSE_EVENTS


async def create_response(request: Request) -> Response:
    context = context_of(request)
    body = await _body(context, request)
    if body.model is None:
        raise ApiError("model: missing", param="model", code="missing_required_parameter")
    plan = await _planned(context, request, body)
    try:
        job = await _job(context, request, plan)
    except ApiError as error:
        told = plan.told(error)
        if told.code == TOO_LONG and body.stream:  # agents look for it in the stream
            return await _failed(context, request, plan, told)
        plan.hold.release()
        raise told from None
    except BaseException:
        plan.hold.release()
        raise
    making = Making(context, plan, job, _rounds(context, request, plan))
    headers = {} if job is None or job.session is None else {SESSION_HEADER: job.session}
    try:
        if body.background:
            return await _in_background(context, request, making, headers)
        if body.stream:
            alive = _Alive(context, making)
            form = StreamForm(silence=alive, failure=alive.told)
            return await open_stream(
                context, request, _frames(making, alive), headers, making.close, form=form
            )
        shown = await unless_gone(request.receive, _whole(making))
    except BaseException:
        making.close()
        raise
    making.close()
    return json_response(shown, headers=headers)


async def count_input(request: Request) -> Response:
    """POST /v1/responses/input_tokens: how many tokens the prompt of such a request has."""
    context = context_of(request)
    plan = await _planned(context, request, await _body(context, request), lock=False)
    try:
        prompt = await prompt_of(context, request, plan.fields)
    except ApiError as error:
        raise plan.told(error) from None
    return json_response({"object": "response.input_tokens", "input_tokens": len(prompt.ids)})


async def compact(request: Request) -> Response:
    """POST /v1/responses/compact."""
    raise ApiError("This server does not compact histories.", status=404, code="unsupported")


async def _body(context: ServerContext, request: Request) -> ResponsesRequest:
    limits = context.options.limits
    body = decode(await read_body(request, limits.body_bytes), ResponsesRequest, limits)
    set_request_id(request, body.request_id, limits)
    return body


async def _planned(
    context: ServerContext, request: Request, body: ResponsesRequest, *, lock: bool = True
) -> Plan:
    """Servers may be asked for their tools, and stand in line for that: not for a client that has left."""
    work = planned(context, tenant_of(request), body, lock=lock)
    return await unless_gone(request.receive, work)


def _rounds(context: ServerContext, request: Request, plan: Plan) -> Rounds:
    shorten = plan.body.truncation == "auto"
    return Rounds(context, plan, partial(turn_job, context, request, shorten=shorten))


async def _job(context: ServerContext, request: Request, plan: Plan) -> Job | None:
    """Its first turn; None: calls that were approved come before."""
    if plan.keeps:
        context.check_stored(plan.hold.tenant)
        await context.off_loop(_check_size, plan, context.responses.shelf.largest)
        await context.responses.ready()
    if plan.body.prewarm:
        return await warming_job(context, request, plan.fields)
    shorten = plan.body.truncation == "auto"
    if plan.approved:  # calls have effects: what can be refused is refused before
        await check_turn(context, request, plan.fields, shorten=shorten)
        return None
    return await turn_job(context, request, plan.fields, shorten=shorten)


def _check_size(plan: Plan, most: int) -> None:
    """Refuse what is too much to be kept before anything is computed for it."""
    if not plan.body.stored:
        return
    size = len(write_json(plan.items)) + len(write_json([plan.body.instructions, plan.body.tools]))
    if size > most:
        raise ApiError(
            f"store: the response begins with {size} bytes, and one that is kept may begin with {most}",
            status=413,
            param="store",
            code="response_too_large",
        )


async def _whole(making: Making) -> JsonObject:
    async with aclosing(making.events()) as all_events:
        async for _ in all_events:
            pass
    if making.error is not None:
        raise making.error
    return making.fold.response


async def _frames(making: Making, alive: _Alive) -> AsyncGenerator[bytes, None]:
    async with aclosing(making.events()) as all_events:
        async for events in all_events:
            if events:
                alive.heard()
                told = b"".join(map(event_frame, events))
                yield told + DONE if making.fold.over else told


class _Alive:
    """What a foreground stream says while nothing happens, and when it breaks off."""

    def __init__(self, context: ServerContext, making: Making) -> None:
        self._now = context.clock.now
        self._making = making
        self._last = self._now()

    def heard(self) -> None:
        self._last = self._now()

    def __call__(self) -> bytes:
        fold = self._making.fold
        if fold.sequence < 0 or self._now() - self._last < EVENT_SECONDS:
            return KEEP_ALIVE
        self.heard()
        return b"".join(map(event_frame, fold.tick())) or KEEP_ALIVE

    def told(self, error: ApiError) -> bytes:
        fold = self._making.fold
        if fold.over:  # a stream has one end
            return b""
        events = [] if fold.sequence >= 0 else fold.created()
        fold.fail(error)
        return b"".join(map(event_frame, events + fold.ended())) + DONE


async def _failed(context: ServerContext, request: Request, plan: Plan, error: ApiError) -> Response:
    making = Making(context, plan, None, _rounds(context, request, plan))  # from here on it has the claim

    async def frames() -> AsyncGenerator[bytes, None]:
        yield b"".join(map(event_frame, await making.failed(error))) + DONE

    try:
        return await open_stream(context, request, frames(), {}, making.close)
    except BaseException:  # its client has gone before the stream began: nobody else lets go of the claim
        making.close()
        raise


async def _in_background(
    context: ServerContext, request: Request, making: Making, headers: dict[str, str]
) -> Response:
    """Begin it, and answer at once: it goes on whoever reads."""
    lives, shelf = context.responses.lives, context.responses.shelf
    live = lives.begin(making.fold, context.clock.now)
    live.add(making.fold.created("queued"))
    shelf.hold(live.id)  # whoever comes for it finds it, however many are kept meanwhile

    def over() -> None:
        making.close()
        shelf.release(live.id)
        lives.over(live)
        if live.task is not None and (kept := shelf.get(live.id)) is not None and kept.untold:
            publish_end(context, kept)

    try:
        await making.keep(running=True)
    except BaseException:
        over()
        lives.forget(live)
        if shelf.get(live.id) is not None:
            shelf.delete(live.id)
        raise
    shown = dict(making.fold.response)
    live.task = context.background.begin(_drive(making, live), over)
    if not making.plan.body.stream:
        return json_response(shown, headers=headers)

    async def again(request: Request) -> Response:
        return await follow(context, request, found(context, request, live.id), None, headers)

    share(request, again, lambda: not live.over)
    return await follow_live(context, request, live, None, headers)


def publish_end(context: ServerContext, kept: Kept) -> None:
    """Of a background response, to the webhooks that want to know."""

    def told() -> None:
        if (now := context.responses.shelf.get(kept.id)) is not None and now.untold:
            context.responses.shelf.put(msgspec.structs.replace(now, untold=False))

    status = kept.shown()["status"]
    if status in RESPONSE_EVENTS:
        context.hooks.publish(kept.tenant, f"response.{status}", {"id": kept.id}, (kept.id,), told)


def publish_ends(context: ServerContext) -> None:
    """Of those that an earlier server owed."""
    for kept in context.responses.shelf:
        if kept.untold:
            publish_end(context, kept)


async def _drive(making: Making, live: Live) -> None:
    try:
        async with aclosing(making.events(begun=True)) as all_events:
            async for events in all_events:
                live.add(events)
    except asyncio.CancelledError:
        if not live.cancelled:
            raise  # the server leaves; what is on disk says that it ran
        live.add(await making.cancelled())
