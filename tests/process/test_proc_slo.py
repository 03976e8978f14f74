"""Promises from a configuration file, through a real worker that measures its steps, and back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.api_rig import CHAT, user
from tests.process.serving import serving

pytestmark = [pytest.mark.process, pytest.mark.model]

LIMIT = 240.0
FILE = """
[scheduling]
policy = "deadline"
safety = 1.5

[slo]
default = "lax"

[slo.lax]
ttft = 86400
tbt = 3600
shed = true

[slo.hopeless]
ttft = 0.000001

[tenants.default]
weight = 2
"""


def test_what_was_promised_comes_back_as_kept_or_missed(tmp_path: Path) -> None:
    file = tmp_path / "slo.toml"
    file.write_text(FILE)
    flags = ("--config", str(file), "--device-kv", "16MiB", "--max-batched-tokens", "64")
    with serving(*flags, "--max-model-len", "512", patience=LIMIT) as (client, _):
        body = {"model": "smollm2-135m", "messages": [user("Say hello.")], "max_tokens": 3}
        kept = client.post(CHAT, json=body).json()["usage"]["agentserve"]["slo"]
        assert kept == {"met": True, "missed": [], "relegated": False}
        late = client.post(CHAT, json=body, headers={"x-slo": "hopeless"}).json()
        assert late["usage"]["agentserve"]["slo"] == {"met": False, "missed": ["ttft"], "relegated": True}
        page = client.get("/metrics").text
        assert 'agentserve_tenant_slo_total{kind="ttft",outcome="missed",tenant="default"} 1.0' in page
        assert "agentserve_engine_slo_relegated 1.0" in page
