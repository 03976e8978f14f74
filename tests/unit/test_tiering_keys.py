"""Names of KV: stable across processes, and no two inputs with one name."""

from __future__ import annotations

import subprocess
import sys
from array import array

from hypothesis import given
from hypothesis import strategies as st

from tiering.keys import Field, block_key, namespace_digest

FIELDS = st.dictionaries(
    st.text(max_size=4),
    st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.floats(allow_nan=False), st.text(max_size=3),
              st.binary(max_size=3)),
    max_size=3,
)  # fmt: skip


def typed(fields: dict[str, Field]) -> list[tuple[str, str, str]]:
    return sorted((name, type(value).__name__, repr(value)) for name, value in fields.items())


@given(FIELDS, FIELDS)
def test_equal_digests_only_for_equal_typed_fields(a: dict[str, Field], b: dict[str, Field]) -> None:
    assert (namespace_digest(a) == namespace_digest(b)) == (typed(a) == typed(b))


def test_framing_cannot_be_forged() -> None:
    assert namespace_digest({"lora": "a", "salt": "b"}) != namespace_digest({"lora": "ab", "salt": ""})
    assert namespace_digest({"a": 1}) != namespace_digest({"a": True})
    assert namespace_digest({"a": "1"}) != namespace_digest({"a": b"1"})


def test_keys_do_not_depend_on_the_process() -> None:
    """Five interpreters with different hash seeds agree (class 2)."""
    code = (
        "from tiering.keys import *; "
        "print(block_key(namespace_digest({'m': 'x', 'n': None, 'p': 0.5}), bytes(range(64))).hex())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": str(seed), "PYTHONPATH": ":".join(sys.path)},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in range(5)
    }  # fmt: skip
    assert len(found) == 1


def test_a_key_names_the_whole_prefix() -> None:
    root = namespace_digest({})
    page = array("i", range(16)).tobytes()
    assert block_key(block_key(root, page), page) != block_key(root, page)
