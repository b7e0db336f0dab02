"""Whatever the draft, the output is the target's (cases 9-14).

Equal means equal: these pairs have no near-ties on these prompts. The distribution of sampled tokens is in
test_distribution.py.
"""

from __future__ import annotations

import warnings
from typing import Any, Literal

import numpy as np
import pytest
import reference
from decoding import BLOCKS, BUDGET, PROMPTS, SEEDS, C, autoregressive, pair, perfect, rounds_of, warm

from dflash_jax import decode, rounds, stepwise, testing
from dflash_jax.config import SLIDING
from dflash_jax.generation import DraftWarning, Generation, finish
from dflash_jax.policy import Adaptive, Fixed
from dflash_jax.sampling import sampling
from dflash_jax.state import Models, Options
from dflash_jax.tree import TreeShape

ADAPTIVE = Options(Adaptive((2, 4, C)))


def run(models: Models, options: Options = BLOCKS, sampled: bool = False, **request: Any) -> Generation:
    how = warm() if sampled else sampling()
    return decode.complete(models, PROMPTS, options, max_new_tokens=BUDGET, how=how, seeds=SEEDS, **request)


def test_the_output_is_worth_comparing() -> None:
    """Many tokens, no period, and no two rows alike: a shifted or repeated token would show."""
    rows = autoregressive()
    assert len({tuple(row) for row in rows}) == 8
    for row in rows:
        assert len(set(row)) >= 5
        assert all(row[-24:-p] != row[-24 + p :] for p in range(1, 13))
    assert autoregressive(sampled=True) != rows


def test_autoregressive_output_is_the_references() -> None:
    """The baseline of every comparison here, against NumPy: each token is the best of a forward over all
    before it, and no runner-up is near."""
    models = pair()
    for prompt, row in zip(PROMPTS, autoregressive(), strict=True):
        logits, _ = reference.target(models.target.config, models.target_params, [*prompt, *row[:-1]])
        two = np.sort(logits[len(prompt) - 1 :], axis=-1)[:, -2:]
        assert logits[len(prompt) - 1 :].argmax(-1).tolist() == row
        assert (two[:, 1] - two[:, 0]).min() > 1e-4


@pytest.mark.parametrize("sampled", [False, True])
def test_a_random_draft(sampled: bool) -> None:
    generation = run(pair(), sampled=sampled)
    assert generation.tokens == autoregressive(sampled)
    assert 1.05 < generation.tau < 2, "it is right now and then"


@pytest.mark.parametrize("sampled", [False, True])
def test_a_draft_that_is_always_right(sampled: bool) -> None:
    """Every block is accepted whole, C tokens per round: also when sampling, as the draws are the same."""
    options = ADAPTIVE if sampled else BLOCKS  # which stays at C, and shares its program
    generation = run(perfect(sampled=sampled), options, sampled)
    assert generation.tokens == autoregressive(sampled)
    assert generation.committed == [rounds_of(BUDGET, C)] * 8
    assert generation.committed[0][:-1] == [C] * (BUDGET // C - 1)


def test_a_draft_that_is_always_wrong_is_lossless_and_warned_about() -> None:
    """One token a round for 39 rounds of 8 rows: the signature of a tap or position bug."""
    with pytest.warns(DraftWarning, match="no candidate was accepted in 312 rounds"):
        generation = run(perfect(True))
    assert generation.tokens == autoregressive()
    assert generation.tau == 1.0 and generation.committed == [[1] * (BUDGET - 1)] * 8


def test_no_warning_for_few_rounds_one_acceptance_or_no_draft() -> None:
    wrong = np.ones((8, 128), bool)
    wrong[3, len(PROMPTS[3]) + 1] = False  # one candidate of one row
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(perfect(wrong)).tau > 1
        few = decode.prefill(perfect(True), PROMPTS, BLOCKS, max_new_tokens=8)
        assert finish(decode.generate(perfect(True), few, BLOCKS)).tau == 1.0
        assert run(pair().without_draft()).tau == 1.0


@pytest.mark.parametrize(
    ("options", "sampled"),
    [(BLOCKS, False), (BLOCKS, True), (Options(Fixed(C, 10), tree=TreeShape(9)), False)],
    ids=["greedy", "sampled", "tree"],
)
def test_a_draft_that_chooses_among_few(options: Options, sampled: bool) -> None:
    """Candidates are the best of the first ids, and the text is the target's, which has others too."""
    few, how = 6, warm() if sampled else sampling()
    assert any(token >= few for row in autoregressive(sampled) for token in row)
    models = pair().choosing_among(few)
    state = decode.prefill(models, PROMPTS, options, max_new_tokens=BUDGET, how=how, seeds=SEEDS)
    slots = state.target_cache.slots
    drafted = decode.propose_step(models, state, options, C, slots).candidates.block
    assert (drafted.tokens[:, 1:] < few).all()
    if options is BLOCKS:
        hidden = rounds.denoise(models, state.draft_cache, rounds.embed(models, state.anchor, C), slots)
        every = pair().draft_logits(hidden)
        assert (every.argmax(-1) >= few).any(), "or nothing is left out"
        np.testing.assert_array_equal(drafted.tokens[:, 1:], every[..., :few].argmax(-1))
    last = finish(decode.generate(models, state, options))
    assert last.tokens == autoregressive(sampled) and last.tau > 1


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"layer_types": (SLIDING, "full_attention"), "sliding_window": 6},
    "qwen3_moe": {},
    "qwen3_5_moe": {},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str) -> None:
    """With a draft of its own, against NumPy token by token (qwen3 is everywhere else)."""
    config = testing.target_config(family, **FAMILIES[family])
    models = testing.make_models(config, testing.draft_config(config, num_layers=1), seed=3)
    generation = run(models)
    for prompt, row in zip(PROMPTS, generation.tokens, strict=True):
        logits, _ = reference.target(config, models.target_params, [*prompt, *row[:-1]])
        assert logits[len(prompt) - 1 :].argmax(-1).tolist() == row
    assert 1 < generation.tau < 2


# --- sampling: one seed, one output -------------------------------------------------------------------


@pytest.mark.parametrize("verify", ["batched", "sequential"])
def test_a_seed_gives_one_text_in_every_mode(verify: Literal["batched", "sequential"]) -> None:
    """Matching: a draw depends on seed and position, not on how the position was reached."""
    state = decode.prefill(pair(), PROMPTS, BLOCKS, max_new_tokens=BUDGET, how=warm(), seeds=SEEDS)
    *_, (last, _) = stepwise.generate_stepwise(pair(), state, BLOCKS, verify=verify)
    assert finish(last).tokens == autoregressive(sampled=True)


def test_a_seed_gives_one_text_for_every_block_size() -> None:
    wrong = np.random.default_rng(2).random((8, 64)) < 0.8
    generation = run(perfect(wrong, sampled=True), ADAPTIVE, sampled=True)
    assert set(generation.sizes) == {2, 4, C}
    assert generation.tokens == autoregressive(sampled=True)


@pytest.mark.parametrize("chunk_size", [7, 512])
def test_a_seed_gives_one_text_for_every_split_into_calls(chunk_size: int) -> None:
    """Prompt chunks, and some rounds from Python before the compiled loop takes over."""
    models = pair()
    state = decode.prefill(
        models, PROMPTS, BLOCKS, max_new_tokens=BUDGET, how=warm(), seeds=SEEDS, chunk_size=chunk_size
    )
    steps = stepwise.generate_stepwise(models, state, BLOCKS)
    later, _ = [next(steps) for _ in range(5)][-1]
    assert finish(decode.generate(models, later, BLOCKS)).tokens == autoregressive(sampled=True)


def test_other_seeds_give_other_texts() -> None:
    how, other = warm(), [seed + 1 for seed in SEEDS]
    generation = decode.complete(pair(), PROMPTS, BLOCKS, max_new_tokens=BUDGET, how=how, seeds=other)
    assert all(a != b for a, b in zip(generation.tokens, autoregressive(sampled=True), strict=True))


def test_log_probabilities_are_the_targets() -> None:
    """Of every emitted token, the prefill's too, before temperature and filters."""
    models = perfect(np.random.default_rng(3).random((8, 64)) < 0.3)
    generation = run(models, Options(Fixed(C), logprobs=True))
    assert generation.tokens == autoregressive()
    assert generation.logprobs is not None
    for prompt, tokens, logprobs in zip(PROMPTS, generation.tokens, generation.logprobs, strict=True):
        logits, _ = reference.target(models.target.config, models.target_params, [*prompt, *tokens[:-1]])
        expected = np.log(reference.softmax(logits[len(prompt) - 1 :]))[np.arange(BUDGET), tokens]
        np.testing.assert_allclose(logprobs, expected, atol=1e-4)
    assert run(models).logprobs is None
