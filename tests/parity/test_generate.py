"""Whole generations against `dflash_generate` of the PyPI package: the same tokens from the same rounds."""

from __future__ import annotations

import time
from typing import Any

import dflash.model
import numpy as np
import pytest
import torch
from parity.twins import Twin, draft_twin, target_twin

from dflash_jax.config import check_block_size, check_pair
from dflash_jax.decode import complete
from dflash_jax.generation import Generation
from dflash_jax.policy import Fixed
from dflash_jax.state import Models, Options

BUDGET = 64
VOCAB = 10  # so few tokens that a random draft is often right
SLIDE = {"use_sliding_window": True, "sliding_window": 7}
ALTERNATE = ["full_attention", "sliding_attention"]

# {name: (target, draft)}. The seeds are chosen for drafts that are often right.
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({"family": "llama"}, {}),
    "qwen2-sliding": (
        {"family": "qwen2", "max_window_layers": 1, **SLIDE},
        {"layer_types": ["sliding_attention"] * 2, **SLIDE},
    ),
    "qwen3-sliding": (
        {"family": "qwen3", "head_dim": 16, "layer_types": ALTERNATE * 2, **SLIDE},
        {"layer_types": ALTERNATE, "is_causal": False, **SLIDE},
    ),
    "qwen3": (
        {"family": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
        {"taps": [3], "own": {"input_embedding_scale": 2.0, "final_logit_softcapping": 5.0}},
    ),
}


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Twin, Twin]:
    folder = tmp_path_factory.mktemp(request.param)
    target, draft = PAIRS[request.param]
    twins = (
        target_twin(folder / "target", vocab_size=VOCAB, **target),
        draft_twin(folder / "draft", 8, vocab_size=VOCAB, **draft),
    )
    check_pair(twins[0].module.config, twins[1].module.config)
    return twins


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference asks CUDA for the time when it is asked for statistics."""
    monkeypatch.setattr(dflash.model, "_cuda_time", time.perf_counter)


def prompts(seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, length).tolist() for length in (5, 23, 1, 12, 9, 17)]


def reference(
    pair: tuple[Twin, Twin], prompt: list[int], size: int, stop_ids: list[int]
) -> tuple[list[int], list[int]]:
    """(new tokens, committed per round) of the reference."""
    target, draft = pair
    out = dflash.model.dflash_generate(
        draft.torch, target.torch, torch.tensor([prompt]), BUDGET, stop_ids,
        block_size=size, return_stats=True,
    )  # fmt: skip
    return out.output_ids[0, len(prompt) :].tolist(), list(out.acceptance_lengths)


def ours(pair: tuple[Twin, Twin], size: int, stop_ids: list[int]) -> Generation:
    target, draft = pair
    check_block_size(draft.module.config, size)
    models = Models(target.params, draft.params, target.module, draft.module)
    return complete(
        models, prompts(), Options(Fixed(size)), max_new_tokens=BUDGET, stop_ids=stop_ids, chunk_size=16
    )


def comparable(committed: list[int], size: int) -> int:
    """How many rounds ran with a whole block: the reference shortens the draft's block when fewer than
    `size` tokens of the budget are left, and its draft, which sees the whole block, then says other things."""
    starts = np.cumsum([0, *committed[:-1]])
    return int(np.sum(starts + size <= BUDGET))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_same_tokens_same_rounds(pair: tuple[Twin, Twin], size: int) -> None:
    generation = ours(pair, size, [])
    rounds, kept = 0, 0
    for b, prompt in enumerate(prompts()):
        tokens, committed = reference(pair, prompt, size, [])
        assert generation.tokens[b] == tokens and len(tokens) == BUDGET
        assert generation.finish_reasons[b] == "length"
        n = comparable(committed, size)
        assert generation.committed[b][:n] == committed[:n]
        assert sum(generation.committed[b]) == sum(committed) == BUDGET - 1
        rounds, kept = rounds + n, kept + sum(committed[:n])
    print(size, rounds, kept / rounds, generation.histogram())
    assert rounds > 100


@pytest.mark.parametrize("size", [4, 8])
def test_stop_tokens(pair: tuple[Twin, Twin], size: int) -> None:
    """A stop token ends both at the same place, in the prefill or inside a block, and what it cut off does
    not count as accepted."""
    free = ours(pair, size, [])
    stop_ids = sorted({row[17] for row in free.tokens[:2]})
    generation = ours(pair, size, stop_ids)
    assert "stop" in generation.finish_reasons
    for b, prompt in enumerate(prompts()):
        tokens, committed = reference(pair, prompt, size, stop_ids)
        assert generation.tokens[b] == tokens == free.tokens[b][: len(tokens)]
        n = comparable(committed, size)
        assert generation.committed[b][:n] == committed[:n]
        assert (generation.finish_reasons[b] == "stop") == (tokens[-1] in stop_ids)
