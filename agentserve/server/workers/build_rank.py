"""One rank's model: opened, checked, loaded and put behind an executor. Most workers are one rank."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import torch

from agentserve.executor.pool import KVPool, kv_groups
from agentserve.executor.runner import SamplerPort, TorchExecutor
from agentserve.models.config import DecoderConfig
from agentserve.models.decoder import Decoder
from agentserve.models.load import DTYPES, LoadedModel, OpenModel, open_model
from agentserve.models.parallel import Ranks
from agentserve.models.shard import Shard
from agentserve.models.source import ModelSource, resolve
from agentserve.server.workers.sizes import (
    check_blocks,
    check_settings,
    context_of,
    kv_dtype_of,
    page_counts,
    reach_of,
    storage_of,
)
from agentserve.server.workers.spec import WorkerSpec, device_of
from agentserve.types import KVGroup
from kernels import Backend, backend_for


@dataclass(frozen=True, slots=True, eq=False)
class OpenRank:
    """A rank whose settings fit its model, of which nothing but the config has been read yet."""

    spec: WorkerSpec  # `device` is this rank's own
    shard: Shard
    device: torch.device
    backend: Backend
    source: ModelSource
    opened: OpenModel
    config: DecoderConfig  # what this rank computes
    groups: tuple[KVGroup, ...]

    @property
    def longest(self) -> int:
        """Tokens of the longest context."""
        return context_of(self.spec, self.opened.config)

    def load(self) -> LoadedModel:
        """Read this rank's weights."""
        loaded = self.opened.load(
            DTYPES[self.spec.dtype], self.device, storage_of(self.spec, self.opened), self.shard
        )
        check_blocks(self.spec, self.source, loaded.weights)
        return loaded

    def pages(self, blocks: int = 0) -> tuple[int, ...]:
        """As many pages for every KV group as its device has room for, the weights being there, `blocks`
        bytes of them in blocks."""
        return page_counts(self.spec, self.groups, self.device, blocks)

    def reach(self, pages: tuple[int, ...]) -> int:
        """Positions that a session can come to in a pool of so many pages."""
        return reach_of(self.longest, min(pages), self.spec.page_size)

    def executor(
        self, loaded: LoadedModel, pages: tuple[int, ...], sampler: SamplerPort, ranks: Ranks | None = None
    ) -> TorchExecutor:
        """ranks: the group that computes the model together."""
        decoder = Decoder(
            self.config,
            loaded.weights,
            self.backend.ops,
            self.reach(pages),
            self.spec.activations,
            ranks=ranks,
        )
        pool = KVPool(self.config, pages, self.spec.page_size, kv_dtype_of(self.spec), self.device)
        return TorchExecutor(decoder, pool, sampler)


def open_rank(spec: WorkerSpec, rank: int = 0) -> OpenRank:
    """Raises ValueError (ModelError) or OSError with one line that says what is wrong with the model or the
    settings. Sets the number of threads."""
    torch.set_num_threads(spec.threads)
    spec = msgspec.structs.replace(spec, device=device_of(spec, rank))
    device = _device(spec)
    source = resolve(spec.model)
    backend = backend_for(device)
    opened = open_model(source)
    shard = Shard(rank, spec.tensor_parallel)
    shard.check(opened.config, str(source.path))
    config = shard.config(opened.config)
    check_settings(spec, source, config, backend.ops)  # before minutes of reading weights
    groups = kv_groups(config, spec.page_size, kv_dtype_of(spec))
    return OpenRank(spec, shard, device, backend, source, opened, config, groups)


def _device(spec: WorkerSpec) -> torch.device:
    """The device that is asked for, made this thread's own where it is a GPU. ValueError if there is none."""
    device = torch.device(spec.device)
    if device.type != "cuda":
        return device
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= found:
        has = f"only {found}" if found else "no CUDA device"
        raise ValueError(f"--device {spec.device}: torch finds {has}{_why_none() if not found else ''}")
    torch.cuda.set_device(device)
    return device


def _why_none() -> str:
    return "" if torch.version.cuda else f" (torch {torch.__version__} was built without CUDA)"
