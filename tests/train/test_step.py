"""A training step: what it minimises, and how gradients accumulate."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import DRAFT, TARGET

from dflash_jax import decode, rounds, testing
from dflash_jax.block import chain_block
from dflash_jax.cache import target_cache
from dflash_jax.config import ConfigError
from dflash_jax.drafts import DFlash, init_params
from dflash_jax.policy import Fixed
from dflash_jax.state import AUTOREGRESSIVE, Models, Options
from dflash_jax.targets import abstract_params, make_target
from dflash_jax.targets import init_params as init_target
from dflash_jax.testing import random_params
from train import step
from train.anchors import eligible, sample_anchors
from train.conversations import Example
from train.corpus import pack

SETUP = step.Setup(make_target(TARGET), DFlash(DRAFT), anchors=6, gamma=2.0, chunk=16)


def target_params() -> dict:
    """Scaled up from the usual initialisation, so that greedy text does not repeat one token."""
    return jax.tree.map(lambda x: x * 10 if x.ndim > 1 else x, init_target(TARGET, jax.random.key(0)))


def batch(rows: int, length: int = 20) -> step.Batch:
    tokens = np.random.default_rng(rows).integers(4, 64, (rows, length)).astype(np.int32)
    position = np.broadcast_to(np.arange(length), tokens.shape)
    ends = np.arange(rows)[:, None] % 4 + length - 4
    return step.Batch(tokens, position < ends, (position < ends) & (position >= 6))


def test_predictions_are_what_decoding_proposes() -> None:
    """The whole path of a step (target features, embeddings, blocks, head) against prefill + propose."""
    params, draft = target_params(), init_params(DRAFT, jax.random.key(1))
    models = Models(params, draft, SETUP.target, SETUP.draft)
    tokens = np.random.default_rng(0).integers(4, 64, (1, 20)).astype(np.int32)
    inside = np.ones_like(tokens, bool)
    for anchor in (4, 11):
        state = decode.prefill(models, tokens[:, :anchor].tolist(), Options(Fixed(4)), max_new_tokens=8)
        state = dataclasses.replace(state, anchor=jnp.asarray(tokens[:, anchor]))
        proposed = np.asarray(
            rounds.propose(models, state, Options(Fixed(4)), 4, 64).candidates.block.tokens
        )[0, 1:]
        told = tokens.copy()
        told[0, anchor + 1 : anchor + 4] = proposed  # the text that makes every candidate right
        blocks, _ = step.predict(
            SETUP,
            params,
            draft,
            step.Batch(told, inside, inside),
            np.array([[anchor]]),
            np.ones((1, 1), bool),
        )
        assert int(blocks[0, 0]) == 3


def test_padding_and_unsupervised_tokens_change_nothing() -> None:
    params, draft = target_params(), init_params(DRAFT, jax.random.key(1))
    base = batch(3)
    anchors, keep = sample_anchors(jax.random.key(0), eligible(jnp.asarray(base.supervised)), 6)
    _, measured = step.predict(SETUP, params, draft, base, anchors, keep)
    other = base.replace(tokens=np.where(base.valid, base.tokens, 9))
    wider = jax.tree.map(lambda x: np.pad(x, ((0, 0), (0, 8))), other)
    _, again = step.predict(SETUP, params, draft, wider, anchors, keep)
    assert float(measured.weight) > 0
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), measured, again)


def test_microbatches_give_the_gradient_of_one_batch() -> None:
    """Sequences of unequal length: only global denominators make this true. Anchors: all of them."""
    setup = dataclasses.replace(SETUP, anchors=20, clip=1e9, decay=0.0)
    params, draft = target_params(), init_params(DRAFT, jax.random.key(1))
    state, key, rate = step.init_state(setup, draft), jax.random.key(0), jnp.float32(0.1)
    whole = jax.tree.map(lambda x: x[None], batch(4))
    halves = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), batch(4))
    one, measured, norm = step.train_step(setup, params, state, whole, key, rate)
    two, summed, other = step.train_step(setup, params, state, halves, key, rate)
    np.testing.assert_allclose(norm, other, rtol=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), measured, summed)
    moments = (state.optimizer[1].mu for state in (one, two))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-7), *moments)


def test_a_candidate_set_of_the_whole_vocabulary_is_the_vocabulary() -> None:
    params, draft = target_params(), init_params(DRAFT, jax.random.key(1))
    state, key, rate = step.init_state(SETUP, draft), jax.random.key(0), jnp.float32(0.1)
    whole = jax.tree.map(lambda x: x[None], batch(3))
    _, plain, norm = step.train_step(SETUP, params, state, whole, key, rate)
    frequency = jnp.ones(TARGET.vocab_size)
    setup = dataclasses.replace(SETUP, candidates=TARGET.vocab_size)
    _, same, other = step.train_step(setup, params, state, whole, key, rate, frequency)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), plain, same)
    np.testing.assert_allclose(norm, other, rtol=1e-5)
    fewer = dataclasses.replace(SETUP, candidates=TARGET.vocab_size - 8)
    _, less, _ = step.train_step(fewer, params, state, whole, key, rate, frequency)
    assert float(less.loss) < float(plain.loss)  # fewer rivals
    kinds = [step.at_step(fewer, n).candidates > 0 for n in (0, 1, 7, 8, 9)]
    assert kinds == [False, True, True, False, True]
    with pytest.raises(ConfigError, match=r"objective.candidates is 8: it must hold the 54 labels"):
        step.train_step(dataclasses.replace(SETUP, candidates=8), params, state, whole, key, rate, frequency)


def test_stored_features_are_used_in_place_of_the_targets_forward() -> None:
    params, draft = target_params(), init_params(DRAFT, jax.random.key(1))
    setup = dataclasses.replace(SETUP, soft=0.5)
    base = batch(3)
    features, final = step.target_states(setup, params, jax.tree.map(jnp.asarray, base))
    anchors, keep = sample_anchors(jax.random.key(0), eligible(jnp.asarray(base.supervised)), 6)
    _, online = step.predict(setup, params, draft, base, anchors, keep)
    stored = base.replace(features=features, final=final)
    _, offline = step.predict(setup, params, draft, stored, anchors, keep)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), online, offline)
    _, other = step.predict(setup, params, draft, stored.replace(features=-features), anchors, keep)
    assert float(other.loss) != float(online.loss)


def test_last_states_of_a_hybrid_target_are_what_its_head_reads() -> None:
    """Families differ in their last norm; padding at the end changes nothing before it."""
    config = testing.target_config("qwen3_5", num_layers=2)
    target, params = make_target(config), random_params(abstract_params(config))
    draft = testing.draft_config(config, taps=(0, 1))
    setup = dataclasses.replace(SETUP, target=target, draft=DFlash(draft), soft=1.0)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 8)).astype(np.int32)
    valid = np.arange(8) < np.array([[8], [5]])
    features, final = jax.jit(step.target_states, static_argnums=0)(
        setup, params, step.Batch(tokens, valid, valid)
    )
    read = partial(jax.jit(target.apply, static_argnames=("taps", "method")), {"params": params})
    alone = read(
        chain_block(jnp.asarray(tokens[1:, :5])), target_cache(config, 1, 0, jnp.float32), taps=draft.taps
    )
    np.testing.assert_allclose(features[1, :5], alone.features[0], rtol=1e-4, atol=1e-4)
    logits = read(final[1:, :5], method="head")
    np.testing.assert_allclose(logits, alone.logits, rtol=1e-4, atol=1e-4)


def test_soft_labels_of_the_target_itself_are_its_logits() -> None:
    """At temperature 0 soft labels are the target's argmax: on greedy text they are the labels."""
    params, draft = target_params(), init_params(DRAFT, jax.random.key(1))
    prompts = [[5, 6, 7, 8], [9, 10, 11, 12]]
    models = Models(params, None, SETUP.target, None)
    answers = decode.complete(models, prompts, AUTOREGRESSIVE, max_new_tokens=12).tokens
    rows = [np.array([*p, *a], np.int32) for p, a in zip(prompts, answers, strict=True)]
    text = pack([Example(row, np.arange(len(row)) >= 4, "", 0.0) for row in rows]).batch([0, 1], 16)
    anchors, keep = sample_anchors(jax.random.key(0), eligible(jnp.asarray(text.supervised)), 6)
    soft = dataclasses.replace(SETUP, soft=1.0, soft_temperature=1e-3)
    _, hard_metrics = step.predict(SETUP, params, draft, text, anchors, keep)
    _, soft_metrics = step.predict(soft, params, draft, text, anchors, keep)
    np.testing.assert_allclose(soft_metrics.loss, hard_metrics.loss, rtol=1e-3)
