"""The JSON Schema Test Suite's schemas, a validator for each, and texts drawn under a grammar's mask."""

import json
import sys
import tarfile
from pathlib import Path

import jsonschema
import numpy as np

SUITE = Path(sys.prefix) / "suites" / "jsonschema-4.26.0.tar.gz"
"""The source distribution of jsonschema carries the JSON Schema Test Suite; `make setup` fetches it."""

DRAFTS = ("draft2020-12", "draft2019-09", "draft7", "draft6", "draft4", "draft3")


def suite():
    """{place: schema} of the suite's distinct schemas, newest draft first."""
    found = {}
    with tarfile.open(SUITE) as files:
        for member in files.getmembers():
            place = member.name.split("/")[1:]
            if place[:2] == ["json", "tests"] and place[2] in DRAFTS and place[-1].endswith(".json"):
                for group in json.load(files.extractfile(member)):
                    found[DRAFTS.index(place[2]), "/".join(place[2:]), group["description"]] = group["schema"]
    distinct = {}
    for (_, place, description), schema in sorted(found.items(), key=lambda item: item[0]):
        distinct.setdefault(json.dumps(schema, sort_keys=True), (f"{place}: {description}", schema))
    return dict(distinct.values())


def validator(schema):
    """By the schema's own draft, or the newest that it is a schema of; None where it is none of any."""
    named = isinstance(schema, dict) and "$schema" in schema
    newest = [jsonschema.Draft202012Validator, jsonschema.Draft201909Validator, jsonschema.Draft4Validator]
    for draft in [jsonschema.validators.validator_for(schema)] if named else newest:
        try:
            draft.check_schema(schema)
        except jsonschema.SchemaError:
            continue
        return draft(schema, format_checker=draft.FORMAT_CHECKER)
    return None


class Drawer:
    """Draws texts as a model without any idea would, with a wish to come to an end."""

    def __init__(self, data, eos, liked=()):
        self.data, self.eos = data, eos
        self.bias = np.zeros(len(data), dtype=np.float32)
        for token, piece in enumerate(data):
            self.bias[token] = 4 * piece.count(b'"') + 5 * (piece.count(b"}") + piece.count(b"]"))
            self.bias[token] -= 3 * (piece.count(b"{") + piece.count(b"[") + piece.count(b",")) + 0.3 * len(
                piece
            )
        self.bias[eos] = 6
        self.bias[list(liked)] = 5  # marks that end something

    def tokens(self, fold, rng, most=600):
        """(the tokens, whether they came to an end)."""
        said = []
        for count in range(most):
            allowed = fold.allowed()
            assert len(allowed), "nothing may follow"
            hurry = 0.2 + count / 60
            logits = rng.standard_normal(len(allowed), dtype=np.float32) * 2 + self.bias[allowed] * hurry
            token = int(allowed[np.argmax(logits)])
            if token == self.eos:
                return said, True
            assert fold.push(token)
            said.append(token)
            if fold.over:
                return said, True
        return said, False

    def text(self, fold, rng, most=600):
        """The text, or None if it did not come to an end."""
        tokens, ended = self.tokens(fold, rng, most)
        return self.written(tokens) if ended else None

    def written(self, tokens):
        return b"".join(self.data[token] for token in tokens).decode(errors="replace")
