"""A model's tokenizer as a folder that `transformers` loads, for tools that count tokens themselves."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders

from agentserve.bench.outside.tools import ToolFailed
from agentserve.models.source import resolve
from agentserve.text import gguf_vocab
from agentserve.text.gguf_metadata import read_metadata


def tokenizer_folder(model: str, folder: Path) -> Path:
    """The model's own folder where it is a Hugging Face one; of a GGUF file, what is written into `folder`.

    Only plain text is encoded by it: control tokens and the chat template are the server's. ToolFailed for
    vocabularies that are not byte-level.
    """
    path = resolve(model).path
    if path.is_dir():
        return path
    encoder = gguf_vocab.vocabulary(read_metadata(path)).encoders.first
    definition = json.loads(encoder.to_str())
    if (definition.get("model") or {}).get("byte_fallback"):
        raise ToolFailed(f"{path.name}: its vocabulary is not byte-level; give --tokenizer FOLDER")
    written = Tokenizer.from_str(encoder.to_str())
    written.decoder = decoders.ByteLevel()
    folder.mkdir(exist_ok=True)
    written.save(str(folder / "tokenizer.json"))
    config = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    (folder / "tokenizer_config.json").write_text(config, encoding="utf-8")
    return folder
