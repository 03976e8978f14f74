"""The cost model's file: what comes back is what was written, or nothing, with one line that says why."""

from __future__ import annotations

import msgspec
import pytest

from agentserve.core.cost import StepCost
from agentserve.core.timing.fingerprint import Fingerprint
from agentserve.core.timing.fitting import Quality
from agentserve.core.timing.saved import CostFileError, SavedCost, checked, decode_saved, encode_saved

HERE = Fingerprint(
    model="6f138b", dtype="bf16", weights="Q4_1/Q8_0", activations="float", kv_dtype="bf16", page_size=16,
    kernels="cpu-avx512bf16", device="cpu", threads=2, machine="EPYC",
)  # fmt: skip
QUALITY = Quality(steps=500, mape=0.031, median=0.02, p95=0.09, exceeded=0.01, width=1.2)
COST = StepCost(fixed=0.1 + 0.2, per_pair=1e-7, knots=(0, 8), slopes=(1e-5, 1.0 / 3), ratio=1.25, extra=1e-4)
SAVED = SavedCost(fingerprint=HERE, cost=COST, steps=2500, held_out=QUALITY)


def read(data: bytes) -> SavedCost | None:
    try:
        return decode_saved(data)
    except CostFileError:
        return None


def test_it_comes_back_to_the_last_bit() -> None:
    assert decode_saved(encode_saved(SAVED)) == SAVED
    assert checked(decode_saved(encode_saved(SAVED)), HERE) == COST


def test_a_person_may_indent_it() -> None:
    compact = msgspec.json.format(encode_saved(SAVED), indent=-1)
    assert decode_saved(compact) == SAVED


@pytest.mark.parametrize(
    ("name", "other"),
    [
        (name, "else" if isinstance(getattr(HERE, name), str) else 99)
        for name in Fingerprint.__struct_fields__
    ],
)
def test_another_machine_or_setting_is_named(name: str, other: object) -> None:
    there = msgspec.structs.replace(HERE, **{name: other})
    with pytest.raises(CostFileError, match=f"{name}: {getattr(HERE, name)}, not {other}") as caught:
        checked(SAVED, there)
    assert "\n" not in str(caught.value)


def test_no_damage_is_believed() -> None:
    """Every byte, changed or cut off: an error of one line, or a file that says the same."""
    data = encode_saved(SAVED)
    for place in range(len(data)):
        for broken in (data[:place], data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]):
            assert read(broken) in (SAVED, None)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "not a cost model"),
        (b"\xff\xfe", "not a cost model"),
        (b"[]", "not a cost model"),
        (b"{}", "`agentserve fit` writes them"),
        (b'{"format": "agentserve step cost", "version": 7}', "version 7; this is version 1"),
        (b'{"format": "agentserve step cost", "version": 1}', "damaged"),
        (b'{"x": ' * 100_000, "not a cost model"),
        (b'{"format": "agentserve step cost", "version": 1, "body": ' + b"[" * 100_000, "not a cost model"),
    ],
)
def test_what_is_no_such_file_is_told(data: bytes, said: str) -> None:
    with pytest.raises(CostFileError, match=said):
        decode_saved(data)


def test_a_model_that_would_not_be_monotone_is_refused() -> None:
    data = encode_saved(SAVED).replace(b'"per_pair": 1e-7', b'"per_pair": -1e-7')
    with pytest.raises(CostFileError, match="damaged"):
        decode_saved(data)


@pytest.mark.parametrize("name", ["per_token", "pace", "ratio", "extra"])
def test_a_model_whose_steps_would_take_forever_is_refused(name: str) -> None:
    cost = msgspec.structs.replace(SAVED.cost, **{name: 1e300})
    with pytest.raises(CostFileError, match=r"a coefficient is above 1e\+30"):
        decode_saved(encode_saved(msgspec.structs.replace(SAVED, cost=cost)))
