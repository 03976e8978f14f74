"""What the API process tells a worker when it starts one: plain values, as JSON on its stdin."""

from __future__ import annotations

import msgspec

from agentserve.config import Activations, ServeConfig, Weights
from agentserve.core.scheduling.registry import check_policy
from agentserve.core.scheduling.settings import SchedulingConfig


class WorkerSpec(msgspec.Struct, frozen=True):
    """One worker's orders. Holds nothing secret: API keys stay in the API process."""

    index: int
    socket: str  # path of the Unix socket to connect to
    parent: int  # process id of the API process; the worker does not outlive it
    model: str
    chat_template: str | None  # a file; it decides which tokens end a message
    dtype: str
    weights: Weights
    activations: Activations
    kv_dtype: str
    device: str
    page_size: int
    max_num_seqs: int
    max_batched_tokens: int
    max_model_len: int | None
    max_step_seconds: float | None
    device_kv: int | None  # bytes; None: sized from free memory
    kv_share: int  # workers that share this machine's free memory
    threads: int
    record: str | None
    log_level: str
    host_kv: int = 0  # bytes of host memory for KV; 0: no host tier
    disk_kv: int = 0  # bytes on disk, this worker's share; 0: no disk tier
    data_dir: str | None = None  # absolute; always there with a disk tier
    tier_policy: str = "priced"
    peers: bool = True  # may read what the other workers of this machine have on disk
    tool_parser: str | None = None  # these decide which control tokens are shown, and which end a turn
    reasoning_parser: str | None = None
    step_model: str | None = None  # a file of `agentserve fit`: what steps cost here
    recording: str | None = None  # absolute; a folder for what each iteration did
    recording_bytes: int = 64 << 20  # of each file
    recording_files: int = 8
    overlap: bool = False  # results are delivered while the next step computes
    scheduling: SchedulingConfig = SchedulingConfig()
    predicts: bool = False  # steps are measured at the start, if nothing else says what they take
    tensor_parallel: int = 1  # ranks that compute the model together; this worker is the first of them
    replaces: bool = False  # a worker that died: what can be done without does not keep this one from it


def replacement(spec: WorkerSpec, kv_bytes: int) -> WorkerSpec:
    """The orders of one that takes a dead worker's place. kv_bytes: of that one's pool, which its turns
    fitted in; what memory is free by now does not count, others have taken their shares."""
    return msgspec.structs.replace(spec, device_kv=kv_bytes or spec.device_kv, replaces=True)


def worker_spec(config: ServeConfig, index: int, socket: str, parent: int, cores: int) -> WorkerSpec:
    """The orders of worker `index`. With several workers or ranks each gets its share of `cores`,
    at least one."""
    count, degree = config.workers.count, config.workers.tensor_parallel
    sharing = count * degree if config.model.device == "cpu" or degree == 1 else 1  # devices are one rank's
    record = config.workers.record
    if record is not None and count > 1:
        record = record.with_name(f"{record.name}.{index}")
    return WorkerSpec(
        index=index,
        socket=socket,
        parent=parent,
        model=config.model.name,
        chat_template=str(config.model.chat_template) if config.model.chat_template else None,
        tool_parser=config.model.tool_parser,
        reasoning_parser=config.model.reasoning_parser,
        dtype=config.model.dtype,
        weights=config.model.weights,
        activations=config.model.activations,
        kv_dtype=config.engine.kv_dtype,
        device=config.model.device,
        page_size=config.engine.page_size,
        max_num_seqs=config.engine.max_num_seqs,
        max_batched_tokens=config.engine.max_batched_tokens,
        max_model_len=config.engine.max_model_len,
        max_step_seconds=config.engine.max_step_seconds,
        device_kv=config.engine.device_kv,
        kv_share=sharing,
        threads=config.workers.threads or max(1, cores // (count * degree)),
        record=str(record) if record is not None else None,
        log_level=config.log_level,
        host_kv=config.storage.host_kv,
        disk_kv=config.storage.disk_kv // count,
        data_dir=str(config.storage.data_dir.absolute()) if config.storage.data_dir else None,
        tier_policy=config.storage.tier_policy,
        step_model=str(config.engine.step_model) if config.engine.step_model is not None else None,
        recording=str(config.recording.dir.absolute()) if config.recording.dir else None,
        recording_bytes=config.recording.file_size,
        recording_files=config.recording.files,
        overlap=overlaps(config),
        scheduling=scheduling_of(config),
        predicts=bool(config.slo.classes),
        tensor_parallel=degree,
    )


def device_of(spec: WorkerSpec, rank: int) -> str:
    """Where a rank computes. GPUs are taken side by side, from the one that is named on: worker after worker,
    rank after rank."""
    if spec.tensor_parallel == 1 or spec.device == "cpu":
        return spec.device
    first = int(spec.device.partition(":")[2] or 0)
    return f"cuda:{first + spec.index * spec.tensor_parallel + rank}"


def overlaps(config: ServeConfig) -> bool:
    """Unless it is said: where the device computes by itself. On a CPU the kernels have all cores already."""
    said = config.engine.overlap
    return config.model.device != "cpu" if said is None else said


def scheduling_of(config: ServeConfig) -> SchedulingConfig:
    """ValueError where there is no such policy."""
    said = config.scheduling
    given = {name: getattr(said, name) for name in ("policy", "safety", "memory_charge", "quantum")}
    levels = {
        "quantum": said.feedback_quantum,
        "patience": said.feedback_patience,
        "levels": said.feedback_levels,
    }
    settings = {name: value for name, value in given.items() if value is not None}
    feedback = {name: value for name, value in levels.items() if value is not None}
    made = msgspec.convert(
        {**settings, "weights": config.tenants.weights, "feedback": feedback}, SchedulingConfig
    )
    check_policy(made.policy)
    return made
