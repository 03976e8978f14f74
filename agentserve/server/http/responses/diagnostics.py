"""Why a prompt did not find what an earlier response left: from the token ids of both. Pure."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from agentserve.server.text_port import JsonObject

_REASONS = (
    ("model_changed", "model"),
    ("prompt_cache_key_changed", "prompt_cache_key"),
    ("tools_changed", "tools"),
    ("text_format_changed", "format"),
    ("reasoning_effort_changed", "effort"),
    ("verbosity_changed", "verbosity"),
    ("service_tier_changed", "service_tier"),
)


@dataclass(frozen=True, slots=True)
class Compared:
    """One response's prompt and what was generated for it."""

    ids: array[int]
    prompt: int  # how many of them are the prompt
    facts: JsonObject

    @property
    def cost(self) -> int:
        return 512 + 4 * len(self.ids)


def facts_of(response: JsonObject) -> JsonObject:
    """What of a response object may have changed its prompt."""
    return {
        "model": response["model"],
        "prompt_cache_key": response["prompt_cache_key"],
        "tools": response["tools"],
        "format": response["text"]["format"],
        "effort": response["reasoning"]["effort"],
        "verbosity": response["text"]["verbosity"],
        "service_tier": response["service_tier"],
    }


def diagnosed(earlier: Compared, prompt: array[int], facts: JsonObject) -> JsonObject:
    """A hit: the shorter of the two prompts begins the other. Else where they part, and the first of the
    things that a client can change that did."""
    shared = common(earlier.ids, prompt)
    if shared >= min(earlier.prompt, len(prompt)):
        return {"type": "cache_hit"}
    changed = (reason for reason, name in _REASONS if earlier.facts[name] != facts[name])
    return {
        "type": "cache_miss",
        "reason": next(changed, "input_changed"),
        "cache_missed_tokens": len(prompt) - shared,
        "comparison_reusable_tokens": shared,
    }


def common(left: array[int], right: array[int]) -> int:
    """How many ids both begin with: halves are compared whole, at the speed of memory."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
