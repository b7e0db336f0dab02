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
SLIDE = {"use_sliding_window": True, "sliding_window": 7}
ALTERNATE = ["full_attention", "sliding_attention"]

# {name: (vocabulary, seed, target, draft)}. Random drafts of so few tokens are often right; these seeds are
# right for many lengths of stretches. No tap is the last layer, where the reference reads the normed state
# and a draft is meant to see the one before the norm.
PAIRS: dict[str, tuple[int, int, dict[str, Any], dict[str, Any]]] = {
    "llama": (4, 0, {"family": "llama"}, {}),
    "qwen2-sliding": (
        *(4, 0, {"family": "qwen2", "max_window_layers": 1, **SLIDE}),
        {"layer_types": ["sliding_attention"] * 2, **SLIDE},
    ),
    "qwen3-sliding": (
        *(6, 2, {"family": "qwen3", "head_dim": 16, "layer_types": ALTERNATE * 2, **SLIDE}),
        {"layer_types": ALTERNATE, "is_causal": False, **SLIDE},
    ),
    "qwen3-scaled": (
        *(4, 6, {"family": "qwen3", "head_dim": 16}),
        {"own": {"input_embedding_scale": 2.0, "final_logit_softcapping": 5.0}},
    ),
}


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Twin, Twin]:
    folder = tmp_path_factory.mktemp(request.param)
    vocab, seed, target, draft = PAIRS[request.param]
    twins = (
        target_twin(folder / "target", seed=seed, vocab_size=vocab, **target),
        draft_twin(folder / "draft", 8, seed=100 + seed, vocab_size=vocab, **draft),
    )
    check_pair(twins[0].module.config, twins[1].module.config)
    return twins


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference asks CUDA for the time when it is asked for statistics."""
    monkeypatch.setattr(dflash.model, "_cuda_time", time.perf_counter)


def prompts(pair: tuple[Twin, Twin]) -> list[list[int]]:
    rng, vocab = np.random.default_rng(0), pair[0].module.config.vocab_size
    return [rng.integers(0, vocab, length).tolist() for length in (5, 23, 1, 12)]


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
        models, prompts(pair), Options(Fixed(size)), max_new_tokens=BUDGET, stop_ids=stop_ids, chunk_size=16
    )


def comparable(committed: list[int], size: int) -> int:
    """How many rounds ran with a whole block: the reference shortens the draft's block when fewer than
    `size` tokens of the budget are left, and its draft, which sees the whole block, then says other things."""
    starts = np.cumsum([0, *committed[:-1]])
    return int(np.sum(starts + size <= BUDGET))


@pytest.mark.parametrize("size", [4, 8])
def test_same_tokens_same_rounds(pair: tuple[Twin, Twin], size: int) -> None:
    generation = ours(pair, size, [])
    rounds, kept = 0, 0
    for b, prompt in enumerate(prompts(pair)):
        tokens, committed = reference(pair, prompt, size, [])
        assert generation.tokens[b] == tokens and len(tokens) == BUDGET
        assert generation.finish_reasons[b] == "length"
        n = comparable(committed, size)
        assert generation.committed[b][:n] == committed[:n]
        assert sum(generation.committed[b]) == sum(committed) == BUDGET - 1
        rounds, kept = rounds + n, kept + sum(committed[:n])
    # Measured: 142 to 224 rounds; 1.13 to 1.32 tokens a round in blocks of 2, 1.32 to 1.62 in blocks of 8.
    assert rounds > 130 and kept / rounds > 1.1, f"{rounds} rounds of {kept / rounds:.2f} tokens say little"


def test_stop_tokens(pair: tuple[Twin, Twin]) -> None:
    """Each token of the vocabulary as the stop token: both end at the same place, in the prefill or inside
    a block, and what it cut off does not count as accepted."""
    size = 8
    free = ours(pair, size, [])
    at_once, stopped, cut = 0, 0, 0
    for stop in range(pair[0].module.config.vocab_size):
        generation = ours(pair, size, [stop])
        for b, prompt in enumerate(prompts(pair)):
            tokens, committed = reference(pair, prompt, size, [stop])
            assert generation.tokens[b] == tokens == free.tokens[b][: len(tokens)]
            n = comparable(committed, size)
            assert generation.committed[b][:n] == committed[:n]
            assert (generation.finish_reasons[b] == "stop") == (tokens[-1] == stop)
            at_once += len(tokens) == 1
            stopped += tokens[-1] == stop
            cut += 0 < n == len(committed) and committed[-1] < free.committed[b][n - 1]
    assert at_once == 4, "the token that a prompt's prefill gives is one of those tried"
    assert stopped > 10 and cut > 0
