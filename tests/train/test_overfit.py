"""The overfit gate: ten conversations, until the real decoder accepts whole blocks; then through files."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from tiny import DRAFT, TARGET

from dflash_jax import decode, pair
from dflash_jax.config import TargetConfig
from dflash_jax.drafts import DFlash
from dflash_jax.policy import Fixed
from dflash_jax.state import AUTOREGRESSIVE, Models, Options
from dflash_jax.targets import abstract_params
from dflash_jax.testing import random_params
from dflash_jax.weights import hf
from train import byte_vocabulary, evaluate, export, loss, step
from train.conversations import Example
from train.corpus import Corpus, pack
from train.initialise import from_target
from train.settings import Settings

PROMPTS, BUDGET = np.random.default_rng(3).integers(4, 64, (10, 6)).tolist(), 25


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> pair.Target:
    folder = tmp_path_factory.mktemp("target")
    byte_vocabulary.write(folder)  # pair.load wants one; no text is made here
    hf.save_target(folder, TARGET, _random(TARGET), np.float32)
    return pair.load(str(folder), "none", dtype="float32").target


def _random(config: TargetConfig) -> dict:
    made: dict = jax.tree.map(np.asarray, random_params(abstract_params(config), gain=2.0))
    return made


def conversations(target: pair.Target) -> tuple[Corpus, list[list[int]]]:
    plain = Models(target.params, target=target.module)
    answers = decode.complete(plain, PROMPTS, AUTOREGRESSIVE, max_new_tokens=BUDGET).tokens
    assert np.mean([len(set(answer)) for answer in answers]) > 6, "the text repeats itself: nothing to learn"
    rows = [
        Example(np.array(p + a, np.int32), np.arange(len(p + a)) >= len(p), str(p), 0.0)
        for p, a in zip(PROMPTS, answers, strict=True)
    ]
    return pack(rows), answers


def test_ten_conversations_until_whole_blocks_are_accepted(target: pair.Target, tmp_path: Path) -> None:
    corpus, answers = conversations(target)
    setup = step.Setup(target.module, DFlash(DRAFT), anchors=12, gamma=2.0, chunk=64)
    start = from_target(target.module, target.params, DRAFT, corpus.tokens[:, :16])
    state = step.init_state(setup, start)
    whole = jax.tree.map(lambda x: x[None], corpus.batch(np.arange(10), 32))
    losses = []
    for n in range(300):
        rate = jnp.float32(4e-3 * min(1.0, n / 20) * (1 - n / 300))
        state, measured, _ = step.train_step(setup, target.params, state, whole, jax.random.key(n), rate)
        losses.append(loss.summary(measured)["loss"])
    assert losses[-1] < 0.05 < losses[0]

    params = jax.tree.map(np.asarray, state.params)
    found = evaluate.held_out(setup, target.params, params, corpus, 10, 32)
    folder = tmp_path / "draft"
    export.write_draft(folder, DRAFT, params, Settings(name="gate", target=target.source), found, {}, target)
    loaded = pair.load(target.source, str(folder), dtype="float32")
    assert loaded.draft is not None
    assert dataclasses.replace(loaded.draft.config, training=DRAFT.training) == DRAFT

    out = decode.complete(loaded.models, PROMPTS, Options(Fixed(4)), max_new_tokens=BUDGET)
    assert out.tokens == answers
    assert out.tau >= 0.9 * 4
    rounded = jax.tree.map(lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float32), params)
    jax.tree.map(np.testing.assert_array_equal, loaded.draft.params, rounded)
    # the walk is what decoding does, to the round: with the weights as the file has them
    again = evaluate.held_out(setup, target.params, loaded.draft.params, corpus, 10, 32)
    np.testing.assert_allclose(again["walk"], out.tau, rtol=1e-6)
    assert abs(found["walk"] - again["walk"]) < 0.1, "bfloat16 changed what the draft says"
