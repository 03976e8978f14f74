"""Turns a Hugging Face folder's `tokenizer.json` into encoders that cannot write control tokens.

The file is loaded without its control tokens, so that plain text can never become one. What the
file's post-processor adds around a prompt (BOS, EOS) is found by asking it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tokenizers import AddedToken
from tokenizers import Tokenizer as Encoder

from agentserve.text.bytelevel import piece_bytes
from agentserve.text.errors import TextError
from agentserve.text.json_files import JsonObject, as_object, objects, read_object, token_text
from agentserve.text.vocabulary import ControlToken, Encoders, Vocabulary, is_control_text

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_SPACE = "▁"
_SEQUENCES = ("normalizers", "pretokenizers", "decoders", "processors")
_FEW_IDS = 1 << 16  # a table this long is cheap, however few of its ids are used


def vocabulary(folder: Path) -> Vocabulary:
    """The vocabulary of a model folder; TextError for missing files and kinds not supported."""
    path = folder / "tokenizer.json"
    definition = read_object(path)
    if not definition:
        raise TextError(f"{folder.name}: no tokenizer.json (slow tokenizers are not supported)")
    config = read_object(folder / "tokenizer_config.json")
    special_map = read_object(folder / "special_tokens_map.json")
    named = {
        name: text for name in _NAMED if (text := token_text(config, name) or token_text(special_map, name))
    }

    definition["truncation"] = definition["padding"] = None
    _check_frame(definition.get("post_processor"), path.name)
    whole = _load(definition, path.name)
    added = _added_tokens(definition, path.name)
    control = [token for token in added if token.special or is_control_text(token.text)]
    kept = [token for token in added if token not in control]
    encoders = _encoders(definition, control, kept, path.name)
    kind = _decoder_kinds(definition.get("decoder"))
    ids = {
        text: index for text, index in whole.get_vocab(with_added_tokens=True).items() if index is not None
    }
    token_bytes = _token_bytes(ids, {token.id for token in added}, kind)
    for token in added:
        if not 0 <= token.id < len(token_bytes):
            raise TextError(f"{path.name}: added token {token.text[:80]!r} has the id {token.id}")
    prefix, suffix = _frame(whole, config, named, ids)
    return Vocabulary(
        encoders=encoders,
        token_bytes=token_bytes,
        control=tuple(control),
        prefix_ids=prefix,
        suffix_ids=suffix,
        eos_ids=_eos_ids(folder, ids.get(named.get("eos_token", ""))),
        strips_leading_space=_strips(definition.get("decoder")),
        special_texts=named,
    )


def _load(definition: JsonObject, name: str) -> Encoder:
    try:
        return Encoder.from_str(json.dumps(definition))
    except Exception as error:  # the Rust side raises bare Exception for every kind of broken file
        raise TextError(f"{name}: {' '.join(str(error).split())[:300]}") from None


def _check_frame(processor: object, name: str) -> None:
    """Every special token that a post-processor writes must be defined by it: the package panics else,
    with a stack trace on stderr."""
    for part in _parts(processor):
        known = part.get("special_tokens")
        for piece in objects(part.get("single"), f"{name}: post_processor"):
            token = piece.get("SpecialToken")
            if isinstance(token, dict) and not (isinstance(known, dict) and token.get("id") in known):
                raise TextError(
                    f"{name}: the post-processor does not define its token {str(token.get('id'))[:80]!r}"
                )


def _added_tokens(definition: JsonObject, name: str) -> list[ControlToken]:
    tokens = []
    for entry in objects(definition.get("added_tokens"), f"{name}: added_tokens"):
        index, text = entry.get("id"), entry.get("content")
        if not isinstance(index, int) or isinstance(index, bool) or not isinstance(text, str):
            raise TextError(f"{name}: an added token has no id or content")
        flags = [entry.get(flag) is True for flag in ("special", "lstrip", "rstrip", "single_word")]
        tokens.append(ControlToken(index, text, *flags))
    return tokens


def _encoders(
    definition: JsonObject, control: Sequence[ControlToken], kept: Sequence[ControlToken], name: str
) -> Encoders:
    plain = copy.deepcopy(definition)
    plain["added_tokens"] = []
    plain["post_processor"] = None
    plain["model"] = _without_control(as_object(plain.get("model"), f"{name}: model"), control, kept, name)
    first = _load(plain, name)
    spaces = _prefix_spaces(plain)

    def variant(schemes: frozenset[str]) -> Encoder:
        """The same model with those kinds of prefix space taken away."""
        parts = {"normalizer": plain.get("normalizer"), "pre_tokenizer": plain.get("pre_tokenizer")}
        shell: JsonObject = {
            "version": "1.0",
            "added_tokens": [],
            "model": {"type": "BPE", "vocab": {}, "merges": []},
            **{key: _strip_prefix(part, schemes) for key, part in parts.items()},
        }
        donor = _load(shell, name)
        encoder = Encoder(first.model)
        if donor.normalizer is not None:
            encoder.normalizer = donor.normalizer
        if donor.pre_tokenizer is not None:
            encoder.pre_tokenizer = donor.pre_tokenizer
        return encoder

    after_control = variant(frozenset({"first"})) if "first" in spaces else first
    joined = variant(spaces) if spaces - {"first"} else after_control
    for encoder in {id(item): item for item in (first, after_control, joined)}.values():
        encoder.add_tokens([_added(token, definition) for token in kept])
    return Encoders(first, after_control, joined)


def _added(token: ControlToken, definition: JsonObject) -> AddedToken:
    entries = objects(definition.get("added_tokens"), "added_tokens")
    normalized = any(entry.get("id") == token.id and entry.get("normalized") is True for entry in entries)
    return AddedToken(
        token.text,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        single_word=token.single_word,
        normalized=normalized,
    )


def _without_control(
    model: JsonObject, control: Sequence[ControlToken], kept: Sequence[ControlToken], name: str
) -> JsonObject:
    """The model with its control tokens renamed to texts that no input can spell (with a raw space).

    Renamed, not removed: ids are positions in a Unigram model, and a BPE model's unknown token
    must exist. Kept tokens that the model itself does not know are added with their ids.
    """
    hidden = {token.text: f" \0{token.id}" for token in control}
    kind = model.get("type") or ("BPE" if "merges" in model else None)
    vocab = model.get("vocab")
    if kind == "Unigram" and isinstance(vocab, list):
        model["vocab"] = [[hidden.get(piece, piece), score] for piece, score in vocab]
    elif kind == "BPE" and isinstance(vocab, dict):
        renamed = {hidden.get(piece, piece): index for piece, index in vocab.items()}
        for token in kept:
            renamed.setdefault(token.text, token.id)
        model["vocab"] = renamed
        merges = model.get("merges")
        model["merges"] = [
            pair for pair in _pairs(merges, name) if not hidden.keys() & {*pair, "".join(pair)}
        ]
        unknown = model.get("unk_token")
        if isinstance(unknown, str):
            model["unk_token"] = hidden.get(unknown, unknown)
    else:
        raise TextError(f"{name}: tokenizer model {kind!r} is not supported (BPE and Unigram are)")
    return model


def _pairs(merges: object, name: str) -> Iterable[tuple[str, str]]:
    """Merges in either form of the file: "left right" or [left, right]."""
    for merge in merges if isinstance(merges, list) else []:
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(part, str) for part in parts):
            raise TextError(f"{name}: a merge is not a pair of tokens")
        yield parts[0], parts[1]


def _parts(step: object) -> list[JsonObject]:
    """A normalizer, pre-tokenizer, post-processor or decoder as the flat list of its steps."""
    if not isinstance(step, dict):
        return []
    inner = next((step[key] for key in _SEQUENCES if key in step), None)
    if inner is None:
        return [step]
    return [part for item in inner for part in _parts(item)] if isinstance(inner, list) else []


def _prefix_spaces(definition: JsonObject) -> frozenset[str]:
    """Which kinds of prefix space the file adds: "first" (a text's start), "always" (every run)."""
    kinds = set()
    for part in _parts(definition.get("normalizer")) + _parts(definition.get("pre_tokenizer")):
        if part.get("type") == "Prepend":
            kinds.add("always")
        elif part.get("type") == "Metaspace":
            scheme = part.get("prepend_scheme", "always")
            kinds |= {str(scheme)} - {"never"} if part.get("add_prefix_space") is not False else set()
        elif part.get("type") == "ByteLevel" and part.get("add_prefix_space") is True:
            kinds.add("always")
    return frozenset(kinds)


def _strip_prefix(step: object, schemes: frozenset[str]) -> object:
    """`step` without the prefix spaces of these kinds."""
    if not isinstance(step, dict):
        return step
    for key in ("normalizers", "pretokenizers"):
        if isinstance(step.get(key), list):
            parts = [_strip_prefix(item, schemes) for item in step[key]]
            return {**step, key: [part for part in parts if part is not None]}
    if step.get("type") == "Prepend" and "always" in schemes:
        return None
    if step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") in schemes:
        rest = {key: value for key, value in step.items() if key != "add_prefix_space"}
        return {**rest, "prepend_scheme": "never"}
    if step.get("type") == "ByteLevel" and "always" in schemes:
        return {**step, "add_prefix_space": False}
    return step


def _decoder_kinds(decoder: object) -> frozenset[str]:
    return frozenset(str(part.get("type")) for part in _parts(decoder))


def _strips(decoder: object) -> bool:
    """Whether decoding drops the prefix space of a text's first word."""
    return any(
        part.get("type") == "Strip"
        or (part.get("type") == "Metaspace" and part.get("prepend_scheme") != "never")
        for part in _parts(decoder)
    )


def _token_bytes(ids: Mapping[str, int], added: set[int], kind: frozenset[str]) -> tuple[bytes, ...]:
    byte_level = "ByteLevel" in kind
    if not byte_level and not kind & {"Metaspace", "Replace", "ByteFallback"}:
        raise TextError(f"tokenizer.json: decoder {sorted(kind)} is not supported")
    table = [b""] * (_last_id(ids) + 1)
    for text, index in ids.items():
        if index in added:
            table[index] = text.encode("utf-8")
        elif byte_level:
            table[index] = piece_bytes(text)
        elif "ByteFallback" in kind and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            table[index] = bytes([int(text[3:5], 16)])
        else:
            table[index] = text.replace(_SPACE, " ").encode("utf-8")
    return tuple(table)


def _last_id(ids: Mapping[str, int]) -> int:
    """The largest id, -1 where there is none; TextError if a table up to it would be mostly holes."""
    last = max(ids.values(), default=-1)
    if last >= max(_FEW_IDS, 2 * len(ids)):
        raise TextError(f"tokenizer.json: id {last} in a vocabulary of {len(ids)} tokens")
    return last


def _frame(
    whole: Encoder, config: Mapping[str, object], named: Mapping[str, str], ids: Mapping[str, int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What belongs before and after a plain prompt; the config's flags win over the post-processor."""
    bare = whole.encode("a", add_special_tokens=False).ids
    framed = whole.encode("a", add_special_tokens=True).ids
    start = next((at for at in range(len(framed)) if framed[at : at + len(bare)] == bare), 0)
    prefix, suffix = tuple(framed[:start]), tuple(framed[start + len(bare) :])
    for flag, name, is_prefix in (
        ("add_bos_token", "bos_token", True),
        ("add_eos_token", "eos_token", False),
    ):
        wanted, index = config.get(flag), ids.get(named.get(name, ""))
        if isinstance(wanted, bool) and index is not None:
            frame = (index,) if wanted else ()
            prefix, suffix = (frame, suffix) if is_prefix else (prefix, frame)
    return prefix, suffix


def _eos_ids(folder: Path, eos: int | None) -> frozenset[int]:
    """Whatever the tokenizer, `generation_config.json` or `config.json` calls an end."""
    found = {eos} if eos is not None else set()
    for name in ("generation_config.json", "config.json"):
        value = read_object(folder / name).get("eos_token_id")
        values = value if isinstance(value, list) else [value]
        found |= {item for item in values if isinstance(item, int) and not isinstance(item, bool)}
    return frozenset(found)
