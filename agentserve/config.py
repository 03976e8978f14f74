"""The server's configuration: frozen values, read once at start by one loader.

Flags override the file; the file overrides the defaults below. A value that is unknown or bad
stops the start with its place and the reason: nothing falls back silently.
"""

from __future__ import annotations

import ipaddress
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, get_args

import msgspec

from agentserve.slo_classes import SloConfig, read_slo
from agentserve.tenant_limits import TenantsConfig, read_tenants
from agentserve.values import (
    ConfigError,
    above_zero,
    at_least,
    boolean,
    budget,
    choice,
    http_url,
    milliseconds,
    optional,
    path,
    positive_seconds,
    seconds,
    size,
    text,
    text_list,
    within,
)
from tiering.policy.registry import policy_names
from tools_bridge.registry import BY_NAME, REASONING

DTYPES = ("bf16", "fp16", "fp32")
Weights = Literal["stored", "expanded"]
Activations = Literal["float", "int8"]
KV_DTYPES = ("auto", "bf16", "fp16", "fp32", "int8")
KEYS_FILE = "tenants/keys.json"  # below the data directory
SMALLEST_RECORD_FILE = 1 << 20  # bytes
LOG_LEVELS = ("debug", "info", "warning", "error")


class ModelConfig(msgspec.Struct, frozen=True):
    """Which model, and in which numbers."""

    name: str = "smollm2-135m"  # a folder, a repository id, a .gguf file, or an alias
    served_names: tuple[str, ...] = ()  # what clients call it; empty: as its source is called
    dtype: str = "bf16"
    weights: Weights = "stored"  # quantised matrices as files have them; "expanded": to dtype
    activations: Activations = "float"  # "int8": rounded for products with blocks; faster, less exact
    device: str = "cpu"
    chat_template: Path | None = None  # overrides the model's own
    tool_parser: str | None = None  # the form of the model's tool calls; None: as its template tells
    reasoning_parser: str | None = None  # how it sets reasoning apart; None: as its template tells
    steady_prompt: bool = False  # what the template moves from turn to turn stays where it was first


class HttpConfig(msgspec.Struct, frozen=True):
    """Where and for whom the server listens."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one, which is printed
    api_keys: tuple[str, ...] = ()  # of the default tenant; where there are no keys at all the server is open
    admin_keys: tuple[str, ...] = ()  # for what is no tenant's: metrics, the cache as a whole
    max_body: int = 4 << 20  # bytes of a request's body
    body_seconds: float = 60.0  # in which it must have come
    max_header: int = 64 << 10  # bytes of a request's line and headers
    max_headers: int = 100
    max_url: int = 8 << 10  # bytes
    header_seconds: float = 10.0  # in which they must have come
    unread_seconds: float = 30.0  # then a client that does not read what lies there for it is cut off
    max_connections: int = 4096  # or as many as the process may have files
    max_connections_per_address: int | None = None  # None: half of all
    force_usage: bool = False  # add usage to every stream, asked for or not
    reasoning_field: Literal["both", "reasoning", "reasoning_content"] = "both"  # of chat replies
    drain_seconds: float = 30.0  # how long running turns may go on after SIGTERM
    tool_wait_seconds: float = 3600.0  # how long a session waits for tool results before it counts as idle
    session_ttl_seconds: float | None = 86400.0  # then an idle session is forgotten; None: never for age
    keep_responses: int = 256 << 20  # bytes of stored responses; the oldest go
    allow_private_callbacks: bool = False  # webhooks may go to private addresses and this machine, by http
    callback_url: str | None = None  # where webhooks' receivers reach this server; None: as it listens
    tools: tuple[str, ...] = ()  # modules whose @agentserve.tool functions agents may call
    private_hosts: tuple[str, ...] = ()  # names or addresses that may be dialled though they are private
    response_ttl_days: int = 30  # then a stored response is gone, as at OpenAI

    def __repr__(self) -> str:
        """Without keys, which are shown to nobody."""
        shown = (f"{name}={getattr(self, name)!r}" for name in self.__struct_fields__ if name not in _SECRET)
        return f"HttpConfig({', '.join(shown)})"


class EngineConfig(msgspec.Struct, frozen=True):
    """One worker's limits."""

    page_size: int = 16  # token slots
    max_num_seqs: int = 64
    max_batched_tokens: int = 512  # a CPU's step stays well under a second; a GPU wants 2048 or more
    max_model_len: int | None = None  # None: what the model was trained for
    max_step_seconds: float | None = None  # of a step's predicted time; None: no such limit
    kv_dtype: str = "auto"  # the model's
    device_kv: int | None = None  # bytes of KV pool per worker; None: from free memory
    step_model: Path | None = None  # what steps cost here, by `agentserve fit`; None: measured when needed
    overlap: bool | None = None  # deliver results while the next step computes; None: where a device does


class WorkersConfig(msgspec.Struct, frozen=True):
    """How many engine processes, and how they share the machine."""

    count: int = 1
    threads: int | None = None  # per worker; None: the cores divided by `count`
    hang_seconds: float = 120.0  # a worker that has work and says nothing for so long is killed and replaced
    record: Path | None = None  # write the engine's ordered log here


class StorageConfig(msgspec.Struct, frozen=True):
    """Where KV goes that the device has no room for, and what outlives the process."""

    host_kv: int = 0  # bytes of host memory per worker, taken at the start; 0: no host tier
    disk_kv: int = 0  # bytes on disk, shared by all workers; 0: no disk tier
    data_dir: Path | None = None  # sessions and KV are kept below it; None: nothing outlives the server
    tier_policy: str = "priced"  # who decides what is kept where


class RecordingConfig(msgspec.Struct, frozen=True):
    """What became of each request and what each iteration did, written down."""

    dir: Path | None = None  # None: nowhere
    file_size: int = 64 << 20  # bytes, of each file
    files: int = 8  # of requests, and of each worker's iterations


NOT_RECORDED = RecordingConfig()


class SchedulingSection(msgspec.Struct, frozen=True):
    """In which order turns run; None: as the scheduler has it."""

    policy: str | None = None  # by name (`core/scheduling/registry.py`)
    safety: float | None = None  # steps count as so many times as long, where deadlines are kept
    memory_charge: float | None = None  # tokens charged to a tenant per token that it holds and second
    quantum: float | None = None  # tokens per round of a tenant of weight 1 ("rounds")
    feedback_quantum: float | None = None  # seconds at the top level ("feedback", "programs")
    feedback_patience: float | None = None  # seconds of waiting after which a turn goes to the top
    feedback_levels: int | None = None


class ServeConfig(msgspec.Struct, frozen=True):
    """Everything `agentserve serve` can be told."""

    model: ModelConfig = ModelConfig()
    http: HttpConfig = HttpConfig()
    engine: EngineConfig = EngineConfig()
    workers: WorkersConfig = WorkersConfig()
    storage: StorageConfig = StorageConfig()
    recording: RecordingConfig = NOT_RECORDED
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    scheduling: SchedulingSection = SchedulingSection()
    slo: SloConfig = SloConfig()  # classes of promises
    tenants: TenantsConfig = TenantsConfig()  # what each may ask for; of the file's [limits] and [tenants]

    @property
    def api_keys(self) -> tuple[str, ...]:
        return self.http.api_keys


def _record_file_size(raw: object) -> int:
    value = size(raw)
    if value < SMALLEST_RECORD_FILE:
        raise ConfigError("expected at least 1MiB: the line of a long reply has to fit")
    return value


class _Key(msgspec.Struct, frozen=True):
    """One setting: its section and name in the file, and how its value is read."""

    section: str
    name: str
    read: Callable[[object], object]
    read_flag: Callable[[object], object] | None = None  # where the flag has another unit than the file


_SECTIONS: dict[str, type[msgspec.Struct]] = {
    "model": ModelConfig,
    "http": HttpConfig,
    "engine": EngineConfig,
    "workers": WorkersConfig,
    "storage": StorageConfig,
    "recording": RecordingConfig,
    "scheduling": SchedulingSection,
}

# Flag name (without dashes) -> where it lives. The file knows each setting by section and name.
_FLAGS: dict[str, _Key] = {
    "model": _Key("model", "name", text),
    "served_model_name": _Key("model", "served_names", text_list),
    "dtype": _Key("model", "dtype", choice(*DTYPES)),
    "weights": _Key("model", "weights", choice(*get_args(Weights))),
    "activations": _Key("model", "activations", choice(*get_args(Activations))),
    "device": _Key("model", "device", text),
    "chat_template": _Key("model", "chat_template", optional(path)),
    "tool_parser": _Key("model", "tool_parser", optional(choice(*BY_NAME))),
    "reasoning_parser": _Key("model", "reasoning_parser", optional(choice(*REASONING))),
    "steady_prompt": _Key("model", "steady_prompt", boolean),
    "host": _Key("http", "host", text),
    "port": _Key("http", "port", at_least(0, 65535)),
    "api_key": _Key("http", "api_keys", text_list),
    "admin_key": _Key("http", "admin_keys", text_list),
    "max_body": _Key("http", "max_body", size),
    "force_usage": _Key("http", "force_usage", boolean),
    "reasoning_field": _Key("http", "reasoning_field", choice("both", "reasoning", "reasoning_content")),
    "drain_seconds": _Key("http", "drain_seconds", seconds),
    "tool_wait_seconds": _Key("http", "tool_wait_seconds", seconds),
    "tools": _Key("http", "tools", text_list),
    "private_host": _Key("http", "private_hosts", text_list),
    "allow_private_callbacks": _Key("http", "allow_private_callbacks", boolean),
    "callback_url": _Key("http", "callback_url", optional(http_url)),
    "keep_responses": _Key("http", "keep_responses", size),
    "response_ttl_days": _Key("http", "response_ttl_days", at_least(1, 36500)),
    "session_ttl_seconds": _Key("http", "session_ttl_seconds", optional(positive_seconds)),
    "page_size": _Key("engine", "page_size", at_least(1, 1024)),
    "max_num_seqs": _Key("engine", "max_num_seqs", at_least(1)),
    "max_batched_tokens": _Key("engine", "max_batched_tokens", at_least(1)),
    "max_model_len": _Key("engine", "max_model_len", optional(at_least(1))),
    "max_step_ms": _Key("engine", "max_step_seconds", optional(positive_seconds), optional(milliseconds)),
    "kv_dtype": _Key("engine", "kv_dtype", choice(*KV_DTYPES)),
    "overlap": _Key("engine", "overlap", optional(boolean)),
    "device_kv": _Key("engine", "device_kv", optional(size)),
    "step_model": _Key("engine", "step_model", optional(path)),
    "workers": _Key("workers", "count", at_least(1, 1024)),
    "threads": _Key("workers", "threads", optional(at_least(1, 4096))),
    "hang_seconds": _Key("workers", "hang_seconds", positive_seconds),
    "record": _Key("workers", "record", optional(path)),
    "host_kv": _Key("storage", "host_kv", budget),
    "disk_kv": _Key("storage", "disk_kv", budget),
    "data_dir": _Key("storage", "data_dir", optional(path)),
    "tier_policy": _Key("storage", "tier_policy", choice(*policy_names())),
    "recording": _Key("recording", "dir", optional(path)),
    "scheduling": _Key("scheduling", "policy", text),
    "log_level": _Key("", "log_level", choice(*LOG_LEVELS)),
}

# Settings of the file alone.
_FILE_ONLY = (
    _Key("http", "body_seconds", positive_seconds),
    _Key("http", "max_header", size),
    _Key("http", "max_headers", at_least(1, 10_000)),
    _Key("http", "max_url", size),
    _Key("http", "header_seconds", positive_seconds),
    _Key("http", "unread_seconds", positive_seconds),
    _Key("http", "max_connections", at_least(1, 1_000_000)),
    _Key("http", "max_connections_per_address", optional(at_least(1, 1_000_000))),
    _Key("recording", "file_size", _record_file_size),
    _Key("recording", "files", at_least(1, 1000)),
    _Key("scheduling", "safety", within(1, 100)),
    _Key("scheduling", "memory_charge", within(0, 1e6)),
    _Key("scheduling", "quantum", above_zero),
    _Key("scheduling", "feedback_quantum", positive_seconds),
    _Key("scheduling", "feedback_patience", positive_seconds),
    _Key("scheduling", "feedback_levels", at_least(1, 64)),
)
_KEY = re.compile(r"[!-~]{1,512}")
_DEVICE = re.compile(r"cpu|cuda(:[0-9]{1,3})?")
_SECRET = frozenset({"api_keys", "admin_keys"})  # shown to nobody, not even where they are wrong


def load(flags: Mapping[str, object], file: Path | None = None) -> ServeConfig:
    """The configuration from command-line flags over a TOML file over the defaults.

    `flags` maps flag names without dashes (`max_num_seqs`) to values; None means "not given".
    Raises ConfigError, one line that names the place and the reason.
    """
    values: dict[tuple[str, str], object] = {}
    if file is not None:
        values.update(_from_file(file))
    for flag, raw in flags.items():
        key = _FLAGS.get(flag)
        if key is None:
            raise ConfigError(f"--{flag.replace('_', '-')}: unknown flag")
        if raw is not None:
            where = f"--{flag.replace('_', '-')}"
            values[key.section, key.name] = _read(
                key.read_flag or key.read, raw, where, secret=key.name in _SECRET
            )
    config = _build(values)
    _check(config)
    return config


def _from_file(file: Path) -> dict[tuple[str, str], object]:
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not TOML: {error}") from None
    known = {(key.section, key.name): key for key in (*_FLAGS.values(), *_FILE_ONLY)}
    tenants = read_tenants(document.pop("limits", None), document.pop("tenants", None), str(file))
    slo = read_slo(document.pop("slo", None), str(file))
    values: dict[tuple[str, str], object] = {("", "tenants"): tenants, ("", "slo"): slo}
    for section, content in document.items():
        if section in _SECTIONS:
            if not isinstance(content, dict):
                raise ConfigError(f"{file}: [{section}]: expected a table, got {_show(content)}")
            entries = [(section, name, raw) for name, raw in content.items()]
        else:
            entries = [("", section, content)]
        for table, name, raw in entries:
            where = f"{file}: [{table}] {name}" if table else f"{file}: {name}"
            key = known.get((table, name))
            if key is None:
                raise ConfigError(f"{where}: unknown {_unknown(raw, table, known)}")
            values[table, name] = _read(key.read, raw, where, secret=name in _SECRET)
    return values


def _unknown(raw: object, table: str, known: Mapping[tuple[str, str], _Key]) -> str:
    if isinstance(raw, dict):
        return f"section; sections are {', '.join(_SECTIONS)}, limits, slo, tenants"
    names = [name for section, name in known if section == table]
    return f"setting; settings here are {', '.join(names)}"


def _read(read: Callable[[object], object], raw: object, where: str, *, secret: bool) -> object:
    try:
        return read(raw)
    except ConfigError as error:
        got = "" if secret else f", got {_show(raw)}"
        raise ConfigError(f"{where}: {error}{got}") from None


def _show(raw: object) -> str:
    shown = f'"{raw}"' if isinstance(raw, str) else str(raw)
    return shown if len(shown) <= 80 else shown[:77] + "..."


def _build(values: Mapping[tuple[str, str], object]) -> ServeConfig:
    parts: dict[str, object] = {}
    for section, kind in _SECTIONS.items():
        given = {name: value for (table, name), value in values.items() if table == section}
        parts[section] = kind(**given)
    parts.update({name: value for (table, name), value in values.items() if table == ""})
    return msgspec.convert(parts, ServeConfig, from_attributes=True)


def _check(config: ServeConfig) -> None:
    """What no single value shows."""
    http, engine = config.http, config.engine
    if any(not key for key in (*http.api_keys, *http.admin_keys)):
        raise ConfigError("api_keys: an empty key would let everyone in")
    for name, keys in (("api_keys", http.api_keys), ("admin_keys", http.admin_keys)):
        if any(not _KEY.fullmatch(key) for key in keys):
            raise ConfigError(f"{name}: a key is 1 to 512 visible ASCII characters: no header brings another")
    if set(http.api_keys) & set(http.admin_keys):
        raise ConfigError("admin_keys: an admin's key cannot be a tenant's too")
    if not is_loopback(http.host) and not (http.api_keys or http.admin_keys or has_keys(config.storage)):
        raise ConfigError(
            f"host {http.host} can be reached from other machines: configure a key "
            "(--api-key, [http] api_keys, or agentserve keys create) or bind 127.0.0.1"
        )
    if engine.max_model_len is not None and engine.max_model_len < 2:
        raise ConfigError("max_model_len: a prompt token and a generated one need at least 2")
    if engine.max_batched_tokens < engine.page_size:
        raise ConfigError(
            f"max_batched_tokens: a step must take at least one page ({engine.page_size} tokens), "
            f"got {engine.max_batched_tokens}"
        )
    if config.model.activations != "float" and config.model.weights != "stored":
        raise ConfigError(
            f"activations: {config.model.activations} ones are for weights in blocks; "
            'that needs weights "stored", got "expanded"'
        )
    if not _DEVICE.fullmatch(config.model.device):
        raise ConfigError(f'device: expected "cpu", "cuda" or "cuda:N", got "{config.model.device}"')
    _check_storage(config.storage)
    _check_classes(config)


def _check_storage(storage: StorageConfig) -> None:
    if storage.disk_kv and storage.data_dir is None:
        raise ConfigError("disk_kv: say where (--data-dir, or [storage] data_dir)")


def _check_classes(config: ServeConfig) -> None:
    for tenant, name in config.tenants.classes.items():
        found = config.slo.classes.get(name)
        if found is None:
            raise ConfigError(f'[tenants.{tenant}] slo: there is no class "{name}" in [slo]')
        if not found.allows(tenant):
            raise ConfigError(f"[tenants.{tenant}] slo: [slo.{name}] tenants has no {tenant}")


def has_keys(storage: StorageConfig) -> bool:
    """Whether keys were made for servers of this data directory."""
    return storage.data_dir is not None and (storage.data_dir / KEYS_FILE).is_file()


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. A name other than localhost counts as public."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
