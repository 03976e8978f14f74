"""`agentserve bench grammar` on two short texts: every kind compiles, and every token it draws is allowed."""

import numpy as np

from agentserve.bench.grammars import drawn, enlarged, requests
from agentserve.executor.grammars import GrammarStore
from tests.grammar_rig import BYTES, EOS, VOCAB, compiler_of_bytes


def test_every_kind_is_drawn() -> None:
    compiler, store = compiler_of_bytes(), GrammarStore(BYTES, VOCAB, [EOS])
    liked = np.zeros(VOCAB, dtype=np.float32)
    for kind, source in requests().items():
        store.define(kind, compiler.compile(source))
        assert min(drawn(store, kind, liked, 1, [EOS])) > 0


def test_a_larger_vocabulary_has_no_token_twice() -> None:
    found = enlarged(BYTES, 1000)
    assert len(found) == len(set(found)) == 1000
    assert found == enlarged(BYTES, 1000)
