"""One loader: flags over file over defaults, and every bad value stops the start with place and reason."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentserve import config as settings
from agentserve.config import ServeConfig, is_loopback, load
from agentserve.executor.pool import KV_DTYPES
from agentserve.models.load import DTYPES, WeightStorage
from agentserve.values import ConfigError, budget, show_size, size
from kernels.ops import Activations

# What goes with float activations only, and what with KV on devices only.
OTHER = """
[model]
weights = "expanded"
[workers]
tensor_parallel = 2
"""


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "config.toml"
    file.write_text(text)
    return file


def test_defaults_are_a_valid_configuration() -> None:
    config = load({})
    assert config == ServeConfig()
    assert (config.http.host, config.http.port, config.api_keys) == ("127.0.0.1", 8000, ())


def test_the_names_of_numbers_are_those_of_the_rooms_that_own_them() -> None:
    """The configuration is read without torch, so it spells them itself."""
    assert set(settings.DTYPES) == set(DTYPES)
    assert set(settings.KV_DTYPES) == {"auto", *KV_DTYPES}
    assert set(get_args(settings.Weights)) == set(get_args(WeightStorage))
    assert set(get_args(settings.Activations)) == set(get_args(Activations))


def test_every_setting_from_the_file(tmp_path: Path) -> None:
    config = load({}, write(tmp_path, """
log_level = "debug"
[model]
name = "a/b"
served_names = ["x", "y"]
dtype = "fp32"
activations = "int8"
device = "cuda:1"
chat_template = "t.jinja"
tool_parser = "mistral"
reasoning_parser = "none"
steady_prompt = true
[http]
host = "0.0.0.0"
port = 9
api_keys = ["k"]
admin_keys = ["a"]
body_seconds = 20
max_header = "32KiB"
max_headers = 50
max_url = "4KiB"
header_seconds = 5
unread_seconds = 6
max_connections = 100
max_connections_per_address = 9
force_usage = true
reasoning_field = "reasoning"
max_body = "8MiB"
drain_seconds = 1.5
tool_wait_seconds = 90
session_ttl_seconds = 120
keep_responses = "1GiB"
response_ttl_days = 7
tools = ["my_tools"]
private_hosts = ["127.0.0.1"]
allow_private_callbacks = true
callback_url = "https://agents.example/base"
[engine]
page_size = 32
max_num_seqs = 3
max_batched_tokens = 99
max_model_len = 1000
device_kv = "2GB"
kv_dtype = "fp16"
overlap = false
max_step_seconds = 0.25
step_model = "m.json"
[workers]
count = 4
threads = 2
hang_seconds = 45
record = "log"
[storage]
host_kv = "1GiB"
disk_kv = "20GB"
data_dir = "d"
tier_policy = "lru"
[recording]
dir = "r"
file_size = "2MiB"
files = 3
"""))  # fmt: skip
    assert config.model.served_names == ("x", "y")
    assert config.model.chat_template == Path("t.jinja")
    assert config.http.api_keys == ("k",)
    assert config.http.force_usage is True
    assert config.http.max_body == 8 << 20
    assert config.http.drain_seconds == 1.5
    assert config.http.session_ttl_seconds == 120.0
    assert (config.http.keep_responses, config.http.response_ttl_days) == (1 << 30, 7)
    assert (config.http.allow_private_callbacks, config.http.callback_url) == (
        True,
        "https://agents.example/base",
    )
    assert config.engine.device_kv == 2_000_000_000
    assert config.engine.max_step_seconds == 0.25
    assert config.engine.step_model == Path("m.json")
    assert (config.workers.count, config.workers.threads, config.workers.record) == (4, 2, Path("log"))
    assert (config.storage.host_kv, config.storage.disk_kv) == (2**30, 20 * 10**9)
    assert (config.storage.data_dir, config.storage.tier_policy) == (Path("d"), "lru")
    assert config.log_level == "debug"
    assert (config.model.activations, config.engine.kv_dtype) == ("int8", "fp16")
    default = ServeConfig()
    other = load({}, write(tmp_path, OTHER))
    assert (other.model.weights, other.workers.tensor_parallel) == ("expanded", 2)
    for part in ("model", "http", "engine", "workers", "storage", "recording"):
        for name in getattr(config, part).__struct_fields__:
            found = {getattr(getattr(each, part), name) for each in (config, other)}
            assert found != {getattr(getattr(default, part), name)}, name


def test_numbers_by_flag() -> None:
    config = load({"weights": "expanded", "kv_dtype": "int8"})
    assert (config.model.weights, config.model.activations, config.engine.kv_dtype) == (
        "expanded",
        "float",
        "int8",
    )
    assert load({"activations": "int8"}).model == ServeConfig().model.__class__(activations="int8")


def test_flags_override_the_file_and_none_means_not_given(tmp_path: Path) -> None:
    file = write(tmp_path, "[engine]\nmax_num_seqs = 3\npage_size = 32\n")
    config = load({"max_num_seqs": "7", "page_size": None, "served_model_name": ["a"]}, file)
    assert (config.engine.max_num_seqs, config.engine.page_size) == (7, 32)
    assert config.model.served_names == ("a",)
    assert load({"max_model_len": "auto"}).engine.max_model_len is None
    assert load({"max_step_ms": "80.5"}).engine.max_step_seconds == 0.0805
    assert load({"max_step_ms": "auto"}).engine.max_step_seconds is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[model]\nweights = "q4"', '[model] weights: expected one of stored, expanded, got "q4"'),
        ('[model]\nactivations = "int4"', '[model] activations: expected one of float, int8, got "int4"'),
        (
            '[engine]\nkv_dtype = "q8"',
            '[engine] kv_dtype: expected one of auto, bf16, fp16, fp32, int8, got "q8"',
        ),
        ('[engine]\nmax_num_seqs = "many"', '[engine] max_num_seqs: expected an integer ≥ 1, got "many"'),
        ("[engine]\nmax_num_seqs = 0", "[engine] max_num_seqs: expected an integer ≥ 1, got 0"),
        ("[engine]\nmax_num_seqs = true", "[engine] max_num_seqs: expected an integer ≥ 1, got True"),
        ("[engine]\nmax_num_seqs = 1.5", "[engine] max_num_seqs: expected an integer ≥ 1, got 1.5"),
        ("[http]\nport = 65536", "[http] port: expected an integer ≥ 0 and ≤ 65535, got 65536"),
        ("[engine]\nmax_seqs = 1", "[engine] max_seqs: unknown setting; settings here are page_size,"),
        ("[motor]\nx = 1", "motor: unknown section; sections are model, http, engine, workers, storage"),
        ("port = 1", "port: unknown setting; settings here are log_level"),
        ('engine = "fast"', '[engine]: expected a table, got "fast"'),
        ('[model]\ndtype = "fp8"', '[model] dtype: expected one of bf16, fp16, fp32, got "fp8"'),
        ("[http]\nforce_usage = 1", "[http] force_usage: expected true or false, got 1"),
        ("[http]\napi_keys = [1]", "[http] api_keys: expected a text that is not empty"),
        ('[http]\napi_keys = [""]', "[http] api_keys: expected a text that is not empty"),
        ('[engine]\ndevice_kv = "lots"', "[engine] device_kv: expected a size in bytes such as 512MiB"),
        ("[http]\ndrain_seconds = -1", "[http] drain_seconds: expected seconds, 0 to 86400, got -1"),
        ("[engine]\nmax_step_seconds = 0", "[engine] max_step_seconds: expected seconds, above 0, got 0"),
        ("[http]\ndrain_seconds = nan", "[http] drain_seconds: expected seconds, 0 to 86400, got nan"),
        (
            "[storage]\nhost_kv = -1",
            "[storage] host_kv: expected a size in bytes such as 512MiB or 2GB, or 0",
        ),
        ("[storage]\nhost_kv = false", "[storage] host_kv: expected a size"),
        ('[storage]\ntier_policy = "best"', "[storage] tier_policy: expected one of priced, lru, "),
        ('[recording]\nfile_size = "1000KB"', "[recording] file_size: expected at least 1MiB: the line"),
        ("[recording]\nfiles = 0", "[recording] files: expected an integer ≥ 1 and ≤ 1000, got 0"),
        ('[model]\nname = ""', "[model] name: expected a text that is not empty"),
        ("x = [", "not TOML"),
    ],
)
def test_a_bad_file_is_one_line_with_place_and_reason(tmp_path: Path, text: str, message: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load({}, file)
    assert str(caught.value).startswith(f"{file}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"max_num_seqs": "many"}, '--max-num-seqs: expected an integer ≥ 1, got "many"'),
        ({"port": "-1"}, "--port: expected an integer"),
        ({"port": "9" * 5000}, "--port: expected an integer"),
        ({"colour": "red"}, "--colour: unknown flag"),
        ({"device": "tpu"}, 'device: expected "cpu", "cuda" or "cuda:N", got "tpu"'),
        ({"device": "cuda:x"}, 'device: expected "cpu", "cuda" or "cuda:N", got "cuda:x"'),
        ({"max_model_len": 1}, "max_model_len"),
        (
            {"weights": "expanded", "activations": "int8"},
            'activations: int8 ones are for weights in blocks; that needs weights "stored", got "expanded"',
        ),
        ({"max_batched_tokens": 15}, "max_batched_tokens: a step must take at least one page (16 tokens)"),
        ({"model": "a\0b"}, "--model: expected a text"),
        ({"api_key": [" "]}, "--api-key"),
        ({"max_step_ms": "0"}, "--max-step-ms: expected milliseconds, above 0, got"),
        ({"max_step_ms": "nan"}, "--max-step-ms: expected milliseconds"),
        (
            {"host_kv": "much"},
            "--host-kv: expected a size in bytes such as 512MiB or 2GB, or 0 for none, got",
        ),
        ({"tier_policy": "oracle"}, "--tier-policy: expected one of priced, lru"),
        ({"disk_kv": "1GiB", "host_kv": "1GiB"}, "disk_kv: say where (--data-dir, or [storage] data_dir)"),
        ({"log_level": "loud"}, "--log-level: expected one of"),
    ],
)
def test_a_bad_flag_is_one_line(flags: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(flags)
    assert message in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml: No such file"):
        load({}, tmp_path / "nowhere.toml")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.1", "example.com", "127.0.0.1.example.com"])
def test_other_machines_need_a_key(host: str) -> None:
    with pytest.raises(ConfigError, match="configure a key"):
        load({"host": host})
    assert load({"host": host, "api_key": ["k"]}).http.host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "[::1]", "127.8.9.1"])
def test_loopback_is_open_without_a_key(host: str) -> None:
    assert is_loopback(host)
    load({"host": host})


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("512MiB", 512 * 2**20),
        ("2GB", 2 * 10**9),
        ("1.5 GiB", 3 * 2**29),
        ("7", 7),
        ("7b", 7),
        (4096, 4096),
        ("1tib", 2**40),
        ("9007199254740993", 2**53 + 1),
    ],
)
def test_sizes(text: object, count: int) -> None:
    assert size(text) == count


@pytest.mark.parametrize(
    "text", ["", "MiB", "-1GB", "1 2MB", "1e9", "0", 0, -5, True, None, 1.5, "1PiB", "9" * 39]
)
def test_bad_sizes(text: object) -> None:
    with pytest.raises(ConfigError, match="expected a size"):
        size(text)


def test_a_tier_of_no_bytes_is_no_tier() -> None:
    for none in ("0", 0):
        assert budget(none) == 0
    assert budget("2KiB") == 2048
    config = load({"host_kv": "0", "disk_kv": "0", "data_dir": "d"})
    assert (config.storage.host_kv, config.storage.disk_kv) == (0, 0)
    assert load({"data_dir": "auto"}).storage.data_dir is None


@given(st.text(max_size=30))
def test_no_text_crashes_the_size_reader(text: str) -> None:
    with suppress(ConfigError):
        assert size(text) > 0


def test_shown_sizes() -> None:
    assert [show_size(n) for n in (5, 2048, 402653184, 3 * 2**29)] == ["5 B", "2.0 KiB", "384 MiB", "1.5 GiB"]
