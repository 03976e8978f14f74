"""One call from a model source to config, weights and digest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from agentserve.models.config import DecoderConfig
from agentserve.models.errors import ModelError
from agentserve.models.gguf_config import gguf_config
from agentserve.models.gguf_file import GgufFile
from agentserve.models.gguf_weights import load_gguf_weights
from agentserve.models.hf_config import hf_config, read_values
from agentserve.models.quantization import Quantization, quantization_of
from agentserve.models.rope import inverse_frequencies
from agentserve.models.safetensors_weights import load_safetensors_weights, weight_files
from agentserve.models.shard import WHOLE, Shard
from agentserve.models.source import ModelSource
from agentserve.models.weights import DecoderWeights

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

WeightStorage = Literal["stored", "expanded"]
"""Whether quantised matrices stay as the file stores them, or are expanded to the model's dtype."""

# What damage leads to beyond what the readers look for: which of these depends on the damaged byte.
_DAMAGE = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    MemoryError,
    RuntimeError,  # RecursionError too, and torch's own for want of memory
)


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model in memory. `digest` names its weight files' content (64 hex digits).

    `config` is the whole model's, also where `weights` are a rank's part (`Shard.config`).
    `quantization`: how a folder's codes were read, if it has any."""

    config: DecoderConfig
    weights: DecoderWeights
    digest: str
    quantization: Quantization | None = None


@dataclass(frozen=True, slots=True, eq=False)
class OpenModel:
    """A model whose config has been read and whose weights have not. `file`: of a GGUF source, its
    vocabulary parsed, which takes a second. `quantization`: of a folder, if it has any."""

    source: ModelSource
    config: DecoderConfig
    file: GgufFile | None
    quantization: Quantization | None = None

    def load(
        self,
        dtype: torch.dtype,
        device: torch.device,
        weights: WeightStorage = "expanded",
        shard: Shard = WHOLE,
    ) -> LoadedModel:
        """Read the weights into memory, or one rank's `shard` of them; whatever is wrong with them is a
        one-line `ModelError`.

        `weights` "stored" keeps a GGUF file's blocks as they are, and a folder's codes with scales.
        """
        source, config, stored = self.source, self.config, weights == "stored"
        if dtype not in DTYPES.values():
            raise ModelError(f"{source.path}: dtype {dtype} is not supported, only {', '.join(DTYPES)}")
        shard.check(config, str(source.path))
        with _one_line(source.path):
            if self.file is not None:
                loaded = load_gguf_weights(self.file, config, dtype, device, stored, shard=shard)
            else:
                loaded = load_safetensors_weights(
                    source.path,
                    config,
                    dtype,
                    device,
                    quantization=self.quantization,
                    stored=stored,
                    shard=shard,
                )
            frequencies = inverse_frequencies(config.rope, config.head_dim, loaded.rope_factors)
            if not bool(frequencies.isfinite().all()):
                raise ModelError(f"{source.path}: its rotary settings give no finite frequencies")
            return LoadedModel(config, loaded, weights_digest(source), self.quantization)


def open_model(source: ModelSource) -> OpenModel:
    """Read the config alone. A `ModelError` as from `OpenModel.load`."""
    with _one_line(source.path):
        if source.kind == "gguf":
            file = GgufFile(source.path)
            return OpenModel(source, gguf_config(file), file)
        path = source.path / "config.json"
        values, place = read_values(path), str(path)
        return OpenModel(source, hf_config(values, place), None, quantization_of(values, place))


def load_model(
    source: ModelSource, dtype: torch.dtype, device: torch.device, weights: WeightStorage = "expanded"
) -> LoadedModel:
    """Open and load in one go."""
    return open_model(source).load(dtype, device, weights)


@contextmanager
def _one_line(path: Path) -> Iterator[None]:
    """Whatever goes wrong inside is a `ModelError` that names `path`."""
    try:
        yield
    except ModelError:
        raise
    except _DAMAGE as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"{path}: cannot be read ({type(error).__name__}: {reason})") from error


def weights_digest(source: ModelSource) -> str:
    """SHA-256 over the weight files: every name, shape, dtype and byte in them is covered.

    File names and lengths are framed in too, so that two different sets of files never hash
    the same bytes. The name under which the model was found is no part of it.
    """
    files = (source.path,) if source.kind == "gguf" else weight_files(source.path)
    named = [(file.name if len(files) > 1 else "weights" + file.suffix, file) for file in files]
    return _digest(named)


def _digest(files: Sequence[tuple[str, Path]]) -> str:
    digest = hashlib.sha256(b"agentserve-weights-1\0")
    for name, path in files:
        encoded = name.encode()
        try:
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").digest()
        except OSError as error:
            raise ModelError(f"{path}: cannot be read ({error})") from None
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
        digest.update(path.stat().st_size.to_bytes(8, "little") + content)
    return digest.hexdigest()
