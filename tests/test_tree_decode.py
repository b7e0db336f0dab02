"""Decoding with trees: the output is autoregressive whatever the tree and the draft, greedy and sampled; rows
have their own trees; more candidates never lose what the chain had."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from decoding import BUDGET, PROMPTS, SEEDS, VOCAB, C, autoregressive, pair, perfect, warm

from dflash_jax import decode, stepwise, testing
from dflash_jax.config import ConfigError
from dflash_jax.generation import DraftWarning, Generation, finish
from dflash_jax.policy import Adaptive, Fixed
from dflash_jax.sampling import sampling
from dflash_jax.state import Models, Options
from dflash_jax.tree import TreeShape


def tree(budget: int, size: int = C, **shape: object) -> Options:
    return Options(Fixed(size, budget + 1), tree=TreeShape(budget, **shape))


TREES = {
    "narrow": tree(3),
    "wide": tree(20),
    "seeded": tree(12, chain_seed=True),
    "flat": tree(16, temperature=4.0),
    "short block": tree(9, size=3),
    "more than there are": tree(2 * VOCAB, size=2),
}


def run(models: Models, options: Options, **request: object) -> Generation:
    return decode.complete(models, PROMPTS, options, max_new_tokens=BUDGET, seeds=SEEDS, **request)


@pytest.mark.parametrize(
    ("name", "sampled"), [*((name, False) for name in TREES), ("wide", True), ("seeded", True)]
)
def test_a_random_draft_changes_nothing(name: str, sampled: bool) -> None:
    generation = run(pair(), TREES[name], how=warm() if sampled else sampling())
    assert generation.tokens == autoregressive(sampled)
    assert max(generation.sizes) <= TREES[name].largest, "what a round can commit at most: its deepest path"
    assert all(
        n <= size for row in generation.committed for n, size in zip(row, generation.sizes, strict=False)
    )
    if name in ("wide", "more than there are"):
        assert generation.tau > 1.2, "among so many candidates of 11 tokens some are right"


@pytest.mark.parametrize("sampled", [False, True])
def test_a_row_alone_has_the_same_rounds(sampled: bool) -> None:
    how = warm() if sampled else sampling()
    together = run(pair(), TREES["wide"], how=how)
    for row in (0, 5):
        alone = decode.complete(
            pair(), [PROMPTS[row]], TREES["wide"], max_new_tokens=BUDGET, seeds=[SEEDS[row]], how=how
        )
        assert alone.tokens[0] == together.tokens[row]
        assert alone.committed[0] == together.committed[row]


def test_a_perfect_draft_fills_its_blocks() -> None:
    """The reciting draft is sure: the chain is in the tree, and a round commits C tokens."""
    generation = run(perfect(), tree(C + 3))
    assert generation.tokens == autoregressive()
    assert set(generation.committed[0][:-1]) == {C}


def test_a_second_choice_is_accepted() -> None:
    """A draft whose best candidate is always wrong and whose second is right: a chain commits 1 token a round,
    a tree that has room for both more."""

    class Second(testing.ScriptedDraft):
        def logits(self, hidden, head):
            right = super().logits(hidden, head)
            return right + 1.5 * jnp.roll(right, 1, axis=-1)

    texts = [[*prompt, *row] for prompt, row in zip(PROMPTS, autoregressive(), strict=True)]
    recites = testing.scripted(pair(), texts)
    assert recites.draft is not None
    models = dataclasses.replace(recites, draft=Second(recites.draft.config))
    with pytest.warns(DraftWarning, match="no candidate was accepted"):
        chain = run(models, Options(Fixed(2)))
    branched = run(models, tree(2, size=2))
    assert chain.tokens == branched.tokens == autoregressive()
    assert set(chain.committed[0]) == {1}
    assert set(branched.committed[0][:-1]) == {2}


def test_one_seed_gives_one_output_in_every_mode() -> None:
    """Temperature 0.8: autoregressive, chain, tree and adaptive draw the same token at the same position."""
    how = sampling(0.8, top_p=0.95)
    alone = decode.complete(
        pair().without_draft(), PROMPTS, Options(Fixed(1)), max_new_tokens=BUDGET, seeds=SEEDS, how=how
    )
    adaptive = Options(Adaptive((1, C), (1, C)))
    branched = Options(Adaptive((C,), (3, 13)), tree=TreeShape(12))
    for options in (Options(Fixed(C)), tree(12), adaptive, branched):
        generation = run(pair(), options, how=how)
        assert generation.tokens == alone.tokens, options
    assert len(set(generation.sizes)) > 1, "the last of them changes its mind now and then"


@functools.cache
def hybrid() -> Models:
    return testing.make_models(testing.target_config("qwen3_5"))


@pytest.mark.parametrize("rollback", ["tape", "states", "replay"])
def test_hybrid_targets_verify_trees(rollback: str) -> None:
    options = dataclasses.replace(tree(20), rollback=rollback)
    alone = decode.complete(hybrid().without_draft(), PROMPTS[:3], Options(Fixed(C)), max_new_tokens=BUDGET)
    state = decode.prefill(hybrid(), PROMPTS[:3], options, max_new_tokens=BUDGET)
    *_, (last, _) = stepwise.generate_stepwise(hybrid(), state, options)
    found = finish(last)
    assert found.tokens == alone.tokens
    assert found.tau > 1.1
    if rollback != "replay":
        assert finish(decode.generate(hybrid(), state, options)).tokens == alone.tokens


def test_logprobs_are_those_of_the_chain() -> None:
    one = run(pair(), dataclasses.replace(TREES["wide"], logprobs=True))
    two = run(pair(), Options(Fixed(C), logprobs=True))
    np.testing.assert_allclose(np.asarray(one.logprobs), np.asarray(two.logprobs), atol=1e-4)


def test_what_trees_cannot_do_is_refused() -> None:
    options = dataclasses.replace(tree(8), proposal="sample")
    state = decode.prefill(pair(), PROMPTS, options, max_new_tokens=4, how=warm())
    with pytest.raises(ConfigError, match="biased"):
        decode.generate(pair(), state, options)
    with pytest.raises(ConfigError, match="needs a fixed policy"):
        decode.generate(pair(), state, Options(Adaptive((1, C)), proposal="sample"))
    with pytest.raises(ConfigError, match="cannot verify a tree"):
        next(stepwise.generate_stepwise(pair(), state, tree(8), verify="sequential"))
    with pytest.raises(ConfigError, match="12 nodes"):
        decode.generate(pair(), state, Options(Fixed(C, 12), tree=TreeShape(8)))
    with pytest.raises(ConfigError, match="no room"):
        decode.generate(pair(), state, tree(4, chain_seed=True))
