"""Namespaces: one for each salt and model, whatever is cached of them."""

from __future__ import annotations

from agentserve.core.namespaces import Namespaces


def test_a_salt_has_one_namespace_for_each_model() -> None:
    one, other = Namespaces(b"a"), Namespaces(b"b")
    assert one.of("x") == Namespaces(b"a").of("x")
    assert len({one.of("x"), one.of("y"), other.of("x"), one.of("")}) == 4
    assert len(one.of("x")) == 32


def test_many_salts_change_nothing() -> None:
    names = Namespaces(b"a")
    first = names.of("0")
    for salt in range(1, 4200):
        names.of(str(salt))
    assert names.of("0") == first
    assert len(names._known) <= 4096
