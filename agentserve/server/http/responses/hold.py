"""What a response needs of what is kept, found and held until it is done."""

from __future__ import annotations

from agentserve.server.errors import ApiError
from agentserve.server.http.responses.conversations import Conversation
from agentserve.server.http.responses.desk import Desk
from agentserve.server.http.responses.references import not_found
from agentserve.server.http.responses.schemas import ResponsesRequest
from agentserve.server.http.responses.shelf import Kept
from agentserve.server.text_port import JsonObject

_SOON = {"retry-after": "1", "x-should-retry": "true"}


class Hold:
    """Its parent stays, its conversation is locked, and in the background it has a place."""

    def __init__(self, desk: Desk, tenant: str, body: ResponsesRequest, *, lock: bool) -> None:
        """ApiError where the tenant has it not, or it is taken."""
        self._desk = desk
        self.tenant = tenant
        self._open = lock
        self._placed = lock and bool(body.background)
        self.chain: list[Kept] = []
        self.conversation: Conversation | None = None
        if self._placed:
            desk.lives.reserve(tenant)
        try:
            self._take(body, lock)
        except BaseException:
            if self._placed:
                desk.lives.free(tenant)
            raise

    def _take(self, body: ResponsesRequest, lock: bool) -> None:
        desk = self._desk
        if body.previous_response_id is not None:
            self.chain = _chain(desk, self.tenant, body.previous_response_id)
            if lock:
                desk.shelf.hold(self.chain[-1].id)
        elif body.conversation is not None:
            self.conversation = _conversation(desk, self.tenant, _conversation_id(body.conversation))
            if lock:
                desk.conversations.lock(self.conversation.id)

    @property
    def session(self) -> str | None:
        """The public id of the session that made the last of it."""
        if self.conversation is not None:
            return self.conversation.session
        return next((kept.session for kept in reversed(self.chain) if kept.session is not None), None)

    def release(self) -> None:
        """Idempotent."""
        if not self._open:
            return
        self._open = False
        if self.chain:
            self._desk.shelf.release(self.chain[-1].id)
        if self.conversation is not None:
            self._desk.conversations.busy.discard(self.conversation.id)
        if self._placed:
            self._desk.lives.free(self.tenant)


def _conversation_id(given: str | JsonObject) -> str:
    id_ = given.get("id") if isinstance(given, dict) else given
    if not isinstance(id_, str):
        raise ApiError("conversation: must be an id, or an object with one", param="conversation")
    return id_


def _chain(desk: Desk, tenant: str, id_: str) -> list[Kept]:
    chain = desk.shelf.chain(id_)
    if chain is None or chain[-1].tenant != tenant:
        raise not_found("Previous response", id_, "previous_response_id", "previous_response_not_found")
    if chain[-1].running:
        raise ApiError(
            f"previous_response_id: {id_[:80]!r} is not done yet; send this again when its status (GET "
            "/v1/responses/{id}) is neither queued nor in_progress, or end it (POST …/cancel)",
            status=409,
            param="previous_response_id",
            code="response_in_progress",
            headers=_SOON,
        )
    return chain


def _conversation(desk: Desk, tenant: str, id_: str) -> Conversation:
    found = desk.conversations.get(id_)
    if found is None or found.tenant != tenant:
        raise not_found("Conversation", id_, "conversation", "conversation_not_found")
    return found
