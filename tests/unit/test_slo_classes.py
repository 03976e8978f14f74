"""Classes of promises: how the file says them, and what a request, its tenant and the file come to."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentserve.config import load
from agentserve.core.scheduling.registry import policy_names
from agentserve.core.scheduling.settings import DEFAULT_POLICY, SchedulingConfig
from agentserve.server.launch import LaunchError, run
from agentserve.server.workers.spec import scheduling_of, worker_spec
from agentserve.slo_classes import Asked, BadPromise, Promise, Promises, SloClass, SloConfig
from agentserve.types import NO_SLO, Slo
from agentserve.values import ConfigError

FAST, BATCH = SloClass(Slo(ttft=1.0, tbt=0.1), shed=True), SloClass(Slo(total=600.0))
VIP = SloClass(Slo(ttft=0.2), tenants=("vip",))
CONFIG = SloConfig({"fast": FAST, "batch": BATCH, "vip": VIP}, "batch")
PROMISES = Promises(CONFIG, {"vip": "vip", "quick": "fast"})


@pytest.mark.parametrize(
    ("tenant", "asked", "name"),
    [
        ("a", Asked(), "batch"),
        ("quick", Asked(), "fast"),
        ("vip", Asked(), "vip"),
        ("vip", Asked(name="batch"), "batch"),
        ("quick", Asked(tier="batch"), "batch"),
        ("quick", Asked(tier="auto"), "fast"),
        ("a", Asked(tier="vip"), "batch"),  # not for this tenant: as if nothing was said
        ("a", Asked(name="fast", tier="batch"), "fast"),
    ],
)
def test_the_nearest_word_counts(tenant: str, asked: Asked, name: str) -> None:
    found = CONFIG.classes[name]
    assert PROMISES.of(tenant, asked) == Promise(found.slo, found.shed, name)


def test_times_of_a_request_go_before_its_class() -> None:
    asked = Asked(name="fast", times={"ttft": 9.0, "total": 30.0}, shed=False)
    assert PROMISES.of("a", asked) == Promise(Slo(ttft=9.0, tbt=0.1, total=30.0), False, "fast")
    nothing = Promises(SloConfig(), {})
    assert nothing.of("a") == Promise()
    assert nothing.of("a", Asked(times={"tbt": 0.1}, shed=True)) == Promise(Slo(tbt=0.1), True)


@pytest.mark.parametrize("name", ["vip", "nobody's", "", "default"])
def test_no_tenant_has_a_class_that_is_not_for_it(name: str) -> None:
    with pytest.raises(BadPromise, match=r"no class .* for this tenant; classes are fast, batch") as caught:
        PROMISES.of("a", Asked(name=name))
    assert caught.value.part == "class"
    assert "vip" not in str(caught.value).partition(";")[2]


@given(
    st.sampled_from(["ttft", "tbt", "gap", "tpot", "total"]),
    st.sampled_from([0.0, -1.0, float("inf"), float("nan")]),
)
def test_a_time_is_above_zero(kind: str, value: float) -> None:
    with pytest.raises(BadPromise, match="expected seconds above 0") as caught:
        PROMISES.of("a", Asked(times={kind: value}))
    assert caught.value.part == kind


def test_a_server_may_take_no_times() -> None:
    strict = Promises(SloConfig({"fast": FAST}, own=False), {})
    assert strict.of("a", Asked(name="fast")).slo == FAST.slo
    with pytest.raises(BadPromise, match="name a class"):
        strict.of("a", Asked(name="fast", times={"ttft": 0.1}))


# --- the configuration file ------------------------------------------------------------------

FILE = """
[scheduling]
policy = "rounds"
safety = 1.5
quantum = 100
feedback_patience = 2

[slo]
default = "batch"
own = false

[slo.fast]
ttft = 1
tbt = 0.1
shed = true

[slo.batch]
total = 600

[slo.vip]
tpot = 0.05
tenants = ["acme"]

[tenants.acme]
weight = 4
slo = "vip"
concurrent_turns = 3

[tenants.other]
weight = 0.5
"""


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "config.toml"
    file.write_text(text)
    return file


def test_classes_weights_and_the_scheduler_from_the_file(tmp_path: Path) -> None:
    config = load({}, written(tmp_path, FILE))
    assert config.slo == SloConfig(
        {
            "fast": FAST,
            "batch": BATCH,
            "vip": SloClass(Slo(tpot=0.05), tenants=("acme",)),
        },
        "batch",
        False,
    )
    assert config.tenants.classes == {"acme": "vip"}
    assert config.tenants.of("acme").concurrent_turns == 3
    made = scheduling_of(config)
    assert (made.policy, made.safety, made.quantum, made.feedback.patience) == ("rounds", 1.5, 100.0, 2.0)
    assert made.weights == {"acme": 4.0, "other": 0.5}
    spec = worker_spec(config, 0, "socket", 1, 4)
    assert spec.scheduling == made
    assert spec.predicts
    assert not worker_spec(load({}), 0, "socket", 1, 4).predicts


def test_the_flag_goes_before_the_file(tmp_path: Path) -> None:
    config = load({"scheduling": "chunked"}, written(tmp_path, FILE))
    assert scheduling_of(config).policy == "chunked"
    assert scheduling_of(load({})) == SchedulingConfig()
    assert scheduling_of(load({})).policy == DEFAULT_POLICY in policy_names()


def test_an_unknown_policy_stops_the_start_and_lists_those_there_are() -> None:
    with pytest.raises(
        LaunchError, match=r'--scheduling: no scheduling policy "best"; known: .*fair-resumes'
    ):
        run(load({"scheduling": "best"}), lambda config: pytest.fail("built"), lambda ready: None)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[slo.a]\nttft = 0", r"\[slo.a\] ttft: expected seconds, above 0, got 0"),
        (
            "[slo.a]\nttft_ms = 1",
            r"\[slo.a\] ttft_ms: unknown; a class has ttft, tbt, gap, tpot, total, shed",
        ),
        ("[slo.a]\nshed = true", r"\[slo.a\]: a class promises at least one of"),
        ("[slo.a]\ntbt = 1\nshed = true", r"\[slo.a\] shed: queues can only be late for ttft or total"),
        ("[slo.auto]\ntbt = 1", r"\[slo.auto\]: a class cannot be called so"),
        ('[slo."a b"]\ntbt = 1', r"a class cannot be called so"),
        ('[slo]\ndefault = "a"', r'\[slo\] default: there is no class "a"'),
        ("[slo]\nown = 1", r"\[slo\] own: expected true or false, got 1"),
        ("[slo]\nwhat = 1", r"\[slo\] what: unknown setting; they are default, own"),
        ('slo = "a"', r"\[slo\]: expected a table"),
        ('[tenants.t]\nslo = "a"', r'\[tenants.t\] slo: there is no class "a"'),
        (
            '[slo.a]\ntbt = 1\ntenants = ["u"]\n[tenants.t]\nslo = "a"',
            r"\[tenants.t\] slo: \[slo.a\] tenants has no t",
        ),
        ("[tenants.t]\nweight = 0", r"\[tenants.t\] weight: expected a number from 1e-06 to 1e\+06, got 0"),
        ("[tenants.t]\nweight = true", r"\[tenants.t\] weight: expected a number"),
        ("[scheduling]\nsafety = 0.5", r"\[scheduling\] safety: expected a number from 1 to 100, got 0.5"),
        ("[scheduling]\nwhat = 1", r"\[scheduling\] what: unknown setting; settings here are policy, safety"),
    ],
)
def test_what_the_file_says_wrong_stops_the_start(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load({}, written(tmp_path, text))


def test_a_weight_is_no_limit_that_an_admin_sets(tmp_path: Path) -> None:
    config = load({}, written(tmp_path, "[tenants.t]\nweight = 2"))
    assert config.tenants.of("t") == config.tenants.all
    assert Slo() == NO_SLO
