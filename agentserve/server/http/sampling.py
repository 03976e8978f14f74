"""From request fields to `Sampling`, every range checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentserve.server.errors import ApiError, context_too_long
from agentserve.server.http.schemas import SamplingFields
from agentserve.server.limits import INT64_MAX, INT64_MIN, Limits
from agentserve.types import Sampling


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What ranges depend on."""

    vocab_size: int
    max_model_len: int
    end_ids: tuple[int, ...]  # tokens that end a turn


def number(name: str, value: float | None, default: float, low: float, high: float) -> float:
    """`value` within [low, high], `default` when absent."""
    if value is None:
        return default
    if not low <= value <= high:
        raise ApiError(f"{name}: must be in [{low:g}, {high:g}], got {value:g}", param=name)
    return value


def integer(name: str, value: int | None, default: int, low: int, high: int) -> int:
    if value is None:
        return default
    if low <= value <= high:
        return value
    if (low, high) == (INT64_MIN, INT64_MAX) or value > high == INT64_MAX:
        problem = "must fit into 64 bits"
    elif high == INT64_MAX:
        problem = f"must be at least {low}"
    else:
        problem = f"must be between {low} and {high}"
    raise ApiError(f"{name}: {problem}, got {value}", param=name)


def stop_strings(stop: str | list[str] | None, limits: Limits) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > limits.stops:
        raise ApiError(f"stop: at most {limits.stops} stop strings, got {len(stops)}", param="stop")
    for text in stops:
        if not 1 <= len(text) <= limits.stop_chars:
            raise ApiError(f"stop: a stop string has 1 to {limits.stop_chars} characters", param="stop")
    return tuple(dict.fromkeys(stops))


def token_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    for position, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise ApiError(
                f"{name}[{position}]: {token} is not a token id, the vocabulary has {vocab_size}", param=name
            )


def _logit_bias(bias: dict[int, float] | None, facts: ModelFacts, limits: Limits) -> dict[int, float]:
    if not bias:
        return {}
    if len(bias) > limits.logit_bias:
        raise ApiError(
            f"logit_bias: at most {limits.logit_bias} entries, got {len(bias)}", param="logit_bias"
        )
    for token, value in bias.items():
        if not 0 <= token < facts.vocab_size:
            raise ApiError(f"logit_bias: {token} is not a token id", param="logit_bias")
        number("logit_bias", value, 0.0, -100.0, 100.0)
    return dict(bias)


def choices(fields: SamplingFields, limits: Limits) -> int:
    return integer("n", fields.n, 1, 1, limits.choices)


def check_fields(fields: SamplingFields, facts: ModelFacts, limits: Limits) -> None:
    """Everything that does not depend on the prompt, before the prompt is looked at."""
    build(fields, facts, limits, prompt=1, max_tokens=None, seed=0, logprobs=None)
    integer("priority", fields.priority, 0, -limits.priority, limits.priority)
    if fields.cache_salt is not None and not 1 <= len(fields.cache_salt) <= limits.cache_salt_chars:
        raise ApiError(f"cache_salt: must be 1 to {limits.cache_salt_chars} characters", param="cache_salt")
    choices(fields, limits)


def build(
    fields: SamplingFields,
    facts: ModelFacts,
    limits: Limits,
    *,
    prompt: int,
    max_tokens: int | None,
    seed: int,
    logprobs: int | None,
    param: str = "messages",
) -> Sampling:
    """The turn's sampling settings for a prompt of `prompt` tokens.

    `max_tokens` None means what remains of the context; a larger one is clamped to it.
    """
    room = facts.max_model_len - prompt
    if room < 1:
        raise context_too_long(prompt, facts.max_model_len, param)
    wanted = integer("max_tokens", max_tokens, room, 1, INT64_MAX)
    min_tokens = integer("min_tokens", fields.min_tokens, 0, 0, facts.max_model_len)
    if max_tokens is not None and min_tokens > max_tokens:
        raise ApiError("min_tokens: must not exceed max_tokens", param="min_tokens")
    stop_ids = fields.stop_token_ids or []
    if len(stop_ids) > limits.stop_token_ids:
        raise ApiError(f"stop_token_ids: at most {limits.stop_token_ids}", param="stop_token_ids")
    token_ids("stop_token_ids", stop_ids, facts.vocab_size)
    top_k = integer("top_k", fields.top_k, 0, -1, INT64_MAX)
    return Sampling(
        temperature=number("temperature", fields.temperature, 1.0, 0.0, 2.0),
        top_k=min(max(top_k, 0), facts.vocab_size),
        # 0 means "the best token only"; the sampler keeps at least one token whatever top_p is.
        top_p=max(number("top_p", fields.top_p, 1.0, 0.0, 1.0), 1e-9),
        min_p=number("min_p", fields.min_p, 0.0, 0.0, 1.0),
        # Below, scaled logits would leave float32.
        repetition_penalty=number("repetition_penalty", fields.repetition_penalty, 1.0, 0.01, 10.0),
        presence_penalty=number("presence_penalty", fields.presence_penalty, 0.0, -2.0, 2.0),
        frequency_penalty=number("frequency_penalty", fields.frequency_penalty, 0.0, -2.0, 2.0),
        logit_bias=_logit_bias(fields.logit_bias, facts, limits),
        seed=integer("seed", fields.seed, seed, INT64_MIN, INT64_MAX),
        max_tokens=min(wanted, room),
        min_tokens=min(min_tokens, room),
        stop_token_ids=tuple(dict.fromkeys(stop_ids)),
        ignore_eos=bool(fields.ignore_eos),
        stop=stop_strings(fields.stop, limits),
        logprobs=logprobs,
    )


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice `index`: the first keeps the request's, the others draw their own."""
    return (seed + index - INT64_MIN) % (1 << 64) + INT64_MIN
