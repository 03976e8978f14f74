"""How clients are told of a tenant's limits: an error, and headers by the names that their SDKs read."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from agentserve.server.errors import ApiError
from agentserve.server.http.anthropic.errors import is_ours
from agentserve.server.tenants.accounts import OverLimit, Standing


def over_limit(error: OverLimit) -> ApiError:
    return ApiError(
        str(error),
        status=429,
        code="rate_limit_exceeded",
        headers={"retry-after": str(error.wait), "x-should-retry": "true"},
        details={"limit": error.limit},
    )


def rate_headers(path: str, standings: Iterable[Standing], unix: float) -> dict[str, str]:
    """OpenAI's or Anthropic's names, by the API that was called. `unix`: the time now."""
    told: dict[str, str] = {}
    for standing in standings:
        if is_ours(path):
            at = datetime.fromtimestamp(unix + standing.reset, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            name = f"anthropic-ratelimit-{standing.of}"
            told |= {
                f"{name}-limit": str(standing.limit),
                f"{name}-remaining": str(standing.remaining),
                f"{name}-reset": at,
            }
        else:
            told |= {
                f"x-ratelimit-limit-{standing.of}": str(standing.limit),
                f"x-ratelimit-remaining-{standing.of}": str(standing.remaining),
                f"x-ratelimit-reset-{standing.of}": f"{standing.reset:.3f}s",
            }
    return told
