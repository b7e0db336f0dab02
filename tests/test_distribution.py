"""Sampled tokens have exactly the target's filtered distribution, whatever the draft proposes.

Every sequence over a vocabulary of 4 is counted and compared with its probability (chi-square), first
with `accept` alone on tables of logits, chain and tree, then through the decoder. The same counts must
show a planted bias, so that the test is known to see one.
"""

from __future__ import annotations

import functools
import itertools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from scipy import stats

from dflash_jax import decode, sampling, testing
from dflash_jax.block import Block, chain_block, tree_block
from dflash_jax.policy import Adaptive, Fixed
from dflash_jax.sampling import Sampling, accept, filtered, propose_samples
from dflash_jax.state import Options
from dflash_jax.tree import TreeShape

N, V, LENGTH = 40_000, 4, 3
FILTERED = (1.2, 0.85, 3)
Kind = Literal["chain", "sampled chain", "tree"]


def fit(counts: np.ndarray, probs: np.ndarray) -> float:
    """The chi-square p-value of these counts; cells that expect fewer than 5 are one cell."""
    assert counts[probs == 0].sum() == 0, "a sequence that cannot occur did"
    expected = probs * counts.sum()
    rare = (expected < 5) & (expected > 0)
    keep = ~rare & (expected > 0)
    observed = np.append(counts[keep], counts[rare].sum())
    expected = np.append(expected[keep], expected[rare].sum())
    if expected[-1] == 0:
        observed, expected = observed[:-1], expected[:-1]
    assert len(expected) > 10, "too few cells to see anything"
    return float(stats.chisquare(observed, expected).pvalue)


def sequence_probs(next_probs, length: int) -> np.ndarray:
    """The probability of every sequence of this length, in the order of itertools.product."""
    return np.array(
        [
            np.prod([next_probs(sequence[:i])[token] for i, token in enumerate(sequence)])
            for sequence in itertools.product(range(V), repeat=length)
        ]
    )


def count_sequences(tokens: np.ndarray) -> np.ndarray:
    index = np.zeros(len(tokens), np.int64)
    for column in tokens.T:
        index = V * index + column
    return np.bincount(index, minlength=V ** tokens.shape[1])


# --- accept alone -------------------------------------------------------------------------------------

# A context is the tokens so far, as a number: the empty one is 0, its continuation with t is 4 c + t + 1.
CONTEXTS = sum(V**depth for depth in range(LENGTH + 3))
_rng = np.random.default_rng(1)
TARGET = 1.5 * _rng.standard_normal((CONTEXTS, V)).astype(np.float32)
# The draft sees the context of the anchor only, as the real one; half of it is the target's opinion.
DRAFT = (_rng.standard_normal((CONTEXTS, 2, V)) + 0.5 * TARGET[:, None]).astype(np.float32)


def context_of(tokens: tuple[int, ...]) -> int:
    return functools.reduce(lambda context, token: V * context + token + 1, tokens, 0)


def exact(settings: tuple[float, float, int]) -> np.ndarray:
    def next_probs(tokens: tuple[int, ...]) -> np.ndarray:
        probs, margin = reference.filtered(TARGET[context_of(tokens)], *settings)
        assert margin > 1e-4
        return probs

    return sequence_probs(next_probs, LENGTH)


def propose(kind: Kind, context, how: Sampling, seeds, positions) -> tuple[Block, jax.Array | None]:
    logits = jnp.asarray(DRAFT)[context]
    root = jnp.zeros((N, 1), jnp.int32)
    if kind == "tree":  # two children of the root, two children of each
        (one, two), (three, four) = (jax.lax.top_k(logits[:, i], 2)[1].T for i in range(2))
        tokens = jnp.stack([root[:, 0], one, two, three, four, three, four], axis=1)
        parents = jnp.broadcast_to(jnp.asarray([-1, 0, 0, 1, 1, 2, 2], jnp.int32), tokens.shape)
        return tree_block(tokens, parents), None
    if kind == "sampled chain":
        candidates, probs = propose_samples(logits, how, seeds, positions)
        return chain_block(jnp.concatenate([root, candidates], axis=1)), probs
    return chain_block(jnp.concatenate([root, jnp.argmax(logits, -1).astype(jnp.int32)], axis=1)), None


def play_round(kind: Kind, how: Sampling, seeds, context, length, tokens):
    block, probs = propose(kind, context, how, seeds, length[:, None] + jnp.arange(1, 3)[None])
    nodes = [context]
    for node in range(1, block.size):
        above = jnp.stack(nodes, axis=1)[jnp.arange(N), block.parents[:, node]]
        nodes.append(V * above + block.tokens[:, node] + 1)
    logits = jnp.asarray(TARGET)[jnp.minimum(jnp.stack(nodes, axis=1), CONTEXTS - 1)]
    result = accept(block, logits, how, seeds, length[:, None] + block.depth + 1, probs)
    for i in range(LENGTH):
        take = (i < result.count) & (length < LENGTH)
        token = result.tokens[:, i]
        at = jax.nn.one_hot(jnp.where(take, length, -1), LENGTH, dtype=bool)
        tokens = jnp.where(at, token[:, None], tokens)
        context = jnp.where(take, V * context + token + 1, context)
        length = length + take.astype(jnp.int32)
    return context, length, tokens, result.count


def play(kind: Kind, how: Sampling) -> tuple[np.ndarray, float]:
    """N sequences of LENGTH tokens by rounds of proposing and accepting; mean count of the first."""
    run = jax.jit(functools.partial(play_round, kind))
    zeros, seeds = jnp.zeros(N, jnp.int32), jnp.arange(N, dtype=jnp.int32)
    context, length, tokens, count = run(how, seeds, zeros, zeros, jnp.zeros((N, LENGTH), jnp.int32))
    first = float(count.mean())
    for _ in range(LENGTH - 1):
        context, length, tokens, _ = run(how, seeds, context, length, tokens)
    assert bool((length == LENGTH).all())
    return np.asarray(tokens), first


@pytest.mark.parametrize("kind", ["chain", "sampled chain", "tree"])
def test_acceptance_is_exact(kind: Kind) -> None:
    tokens, mean = play(kind, sampling.sampling(*FILTERED))
    counts, probs = count_sequences(tokens), exact(FILTERED)
    assert 20 < (probs == 0).sum() < 50, "the filters remove some sequences"
    assert 1.2 < mean < 2.8, "neither always nor never accepted"
    assert fit(counts, probs) > 1e-3
    # The same counts do not fit what a fifth more of temperature would give.
    hotter = probs ** (1 / 1.2)
    assert fit(counts, hotter / hotter.sum()) < 1e-6


def test_a_shared_key_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rejection needs one stream for the proposal, one for the test, one for the residual."""
    monkeypatch.setattr(sampling, "_RESIDUAL", sampling._PROPOSAL)
    tokens, _ = play("sampled chain", sampling.sampling(*FILTERED))
    assert fit(count_sequences(tokens), exact(FILTERED)) < 1e-9


def test_argmax_candidates_under_rejection_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rejection with a q that the candidates were not drawn from is biased: hence matching."""

    def argmax(logits, how, seeds, positions):
        return jnp.argmax(logits, -1).astype(jnp.int32), jax.nn.softmax(filtered(logits, how), -1)

    monkeypatch.setitem(globals(), "propose_samples", argmax)
    tokens, _ = play("sampled chain", sampling.sampling(*FILTERED))
    assert fit(count_sequences(tokens), exact(FILTERED)) < 1e-9


# --- the decoder --------------------------------------------------------------------------------------

SIZES = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8,
         "intermediate_size": 12, "vocab_size": V}  # fmt: skip
SMALL = testing.make_models(
    target := testing.target_config(**SIZES),
    testing.draft_config(target, **SIZES, block_size=4, taps=(0,)),
)
PROMPT = [1, 3, 0]
HOT = (4.0, 0.85, 3)  # the random target is sure of itself


@functools.cache
def decoder_exact(settings: tuple[float, float, int]) -> np.ndarray:
    def next_probs(tokens: tuple[int, ...]) -> np.ndarray:
        logits, _ = reference.target(SMALL.target.config, SMALL.target_params, [*PROMPT, *tokens])
        probs, margin = reference.filtered(logits[-1], *settings)
        assert margin > 1e-4
        return probs

    return sequence_probs(functools.cache(next_probs), LENGTH + 1)


@pytest.mark.parametrize(
    ("options", "choices"),
    [
        (Options(Fixed(4)), V),
        (Options(Fixed(4), "sample"), V),
        (Options(Fixed(4), "sample"), 3),
        (Options(Fixed(4, 7), tree=TreeShape(6)), V),
        (Options(Adaptive((1, 4), (1, 3, 7)), tree=TreeShape(6, chain_seed=True)), V),
    ],
    ids=["chain", "sampled chain", "sampled chain of few", "tree", "adaptive tree"],
)
def test_decoder_is_exact(options: Options, choices: int) -> None:
    """The first token is the prefill's, so all sequences of four: three of them by rounds. choices: ids that the
    draft has."""
    models = SMALL if choices == V else SMALL.choosing_among(choices)
    rows = 4000
    counts, committed = np.zeros(V ** (LENGTH + 1), np.int64), []
    for first in range(0, 20_000, rows):
        generation = decode.complete(
            models, [PROMPT] * rows, options, max_new_tokens=LENGTH + 1,
            how=sampling.sampling(*HOT), seeds=range(first, first + rows), chunk_size=len(PROMPT),
        )  # fmt: skip
        counts += count_sequences(np.array(generation.tokens))
        committed.append(generation.tau)
    assert 1.2 < np.mean(committed) < 2.8
    assert fit(counts, decoder_exact(HOT)) > 1e-3
