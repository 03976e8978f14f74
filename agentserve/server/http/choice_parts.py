"""Pieces of OpenAI's reply shapes that both completion endpoints use."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from agentserve.messages import Token, TurnUsage
from agentserve.server.sessions.answer import Outcome
from agentserve.server.text_port import JsonObject, Tokenizer
from agentserve.types import FinishReason

_LEAST = -9999.0  # JSON has no -inf


def finish_reason(outcome: Outcome, named: bool) -> str:
    """`length` wins; `tool_calls` only with complete calls; a call forced by name ends in `stop`."""
    if outcome.reason is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if outcome.has_calls and not named else "stop"


def usage(
    prompt: int,
    completion: int,
    leaders: Sequence[TurnUsage],
    all_turns: Sequence[TurnUsage],
    reasoning: int = 0,
) -> JsonObject:
    """`leaders`: one turn per prompt, for what is counted once per prompt. Empty: not known
    yet, and what depends on them is left out."""
    reply: JsonObject = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }
    if leaders:
        first = leaders[0]
        reply["prompt_tokens_details"] = {
            "cached_tokens": sum(turn.cached for turn in leaders),
            "cache_write_tokens": sum(max(turn.prompt - turn.cached, 0) for turn in leaders),
        }
        reply["agentserve"] = {
            "computed_tokens": sum(turn.computed for turn in all_turns),
            "preemptions": sum(turn.preemptions for turn in all_turns),
            "swaps": sum(turn.swaps for turn in all_turns),
            "migrations": sum(turn.migrations for turn in all_turns),
            "queue_seconds": round(max(first.admitted - first.arrived, 0.0), 6),
            "ttft_seconds": round(max(first.first_token - first.arrived, 0.0), 6),
        }
        if told := slo_told(all_turns):
            reply["agentserve"]["slo"] = told
    return reply


def slo_told(turns: Sequence[TurnUsage]) -> JsonObject | None:
    """What became of the promises for these turns; None where there were none."""
    kept = {kind for turn in turns for kind in turn.kept}
    missed = {kind for turn in turns for kind in turn.missed}
    if not kept and not missed:
        return None
    return {
        "met": not missed,
        "missed": sorted(missed),
        "relegated": any(turn.relegated for turn in turns),
    }


def chat_logprobs(tokens: Iterable[Token], tokenizer: Tokenizer, top: int) -> JsonObject:
    return {
        "content": [
            _logprob(tokenizer, token.token, token.logprob)
            | {"top_logprobs": [_logprob(tokenizer, id_, value) for id_, value in token.top[:top]]}
            for token in tokens
        ],
        "refusal": None,
    }


def legacy_logprobs(tokens: Sequence[Token], tokenizer: Tokenizer, top: int, offset: int) -> JsonObject:
    """The shape of text completions; `offset`: where in the text the first token begins."""
    texts = [token_text(tokenizer, token.token) for token in tokens]
    offsets: list[int] = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": [
            {token_text(tokenizer, id_): _finite(value) for id_, value in token.top[:top]} for token in tokens
        ]
        if top
        else None,
        "text_offset": offsets,
    }


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """One token on its own; half a character shows as U+FFFD."""
    return _bytes(tokenizer, token).decode("utf-8", "replace")


def _bytes(tokenizer: Tokenizer, token: int) -> bytes:
    table = tokenizer.token_bytes
    return table[token] if 0 <= token < len(table) else b""


def _logprob(tokenizer: Tokenizer, token: int, value: float | None) -> JsonObject:
    data = _bytes(tokenizer, token)
    return {"token": data.decode("utf-8", "replace"), "logprob": _finite(value), "bytes": list(data)}


def _finite(value: float | None) -> float:
    return _LEAST if value is None or math.isnan(value) else max(value, _LEAST)
