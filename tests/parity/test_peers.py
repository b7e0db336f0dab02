"""The other implementations that `bench` runs: with our weights, the same tokens, and times of their own."""

from __future__ import annotations

from pathlib import Path

import folders
import pytest

from dflash_jax import decode, pair
from dflash_jax.policy import Fixed
from dflash_jax.state import Options
from infer import peers

PROMPT, BUDGET, SIZE = [104, 105, 33], 20, 4


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> pair.Pair:
    root = tmp_path_factory.mktemp("pair")
    folders.target(root / "target")
    folders.draft(root / "draft")
    return pair.load(str(root / "target"), str(root / "draft"), dtype="float32")


@pytest.fixture(scope="module")
def others(loaded: pair.Pair) -> peers.Peers:
    return peers.Peers(loaded, ("transformers", "dflash"))


def test_the_same_tokens_in_the_same_rounds(loaded: pair.Pair, others: peers.Peers) -> None:
    ours = decode.complete(loaded.models, [PROMPT], Options(Fixed(SIZE)), max_new_tokens=BUDGET)
    for name in ("transformers", "dflash"):
        answer = others.answer(name, PROMPT, BUDGET, (), SIZE)
        assert answer.tokens == ours.tokens[0], name
        assert min(*answer.prefill, *answer.decoding) > 0
        assert sum(answer.committed) == BUDGET - 1
    assert answer.committed == ours.committed[0]
    assert set(others.versions()) == {"torch", "transformers", "dflash"}


def test_both_end_at_a_stop_token(others: peers.Peers) -> None:
    whole = others.answer("transformers", PROMPT, BUDGET, ()).tokens
    stop = whole[BUDGET // 2]
    expected = whole[: whole.index(stop) + 1]
    for name in ("transformers", "dflash"):
        assert others.answer(name, PROMPT, BUDGET, (stop,), SIZE).tokens == expected


def test_llama_cpp_wants_a_gguf_file(loaded: pair.Pair, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    with pytest.raises(peers.ConfigError, match=r"needs a target from a \.gguf file"):
        peers.Peers(loaded, ("llamacpp",))
