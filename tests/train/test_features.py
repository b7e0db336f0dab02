"""The store of hidden states: it holds what a step would compute, for the corpus that it is opened for."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from tiny import DRAFT, TARGET, draft_config

from dflash_jax.config import ConfigError
from dflash_jax.drafts import DFlash, init_params
from dflash_jax.pair import Target
from dflash_jax.targets import init_params as init_target
from dflash_jax.targets import make_target
from dflash_jax.terminal import Screen
from dflash_jax.tokenizer import ByteTokenizer
from train import corpus, features, pipeline, step
from train.anchors import sample_anchors
from train.conversations import Example
from train.corpus import Corpus
from train.features import Plan, open_store
from train.settings import Data, Run, Settings

CONFIG = dataclasses.replace(TARGET, vocab_size=256)
DATA = Data(max_length=16, widths=(8, 16), tokens=32)  # 4 and 2 rows
SETUP = step.Setup(make_target(CONFIG), DFlash(draft_config(vocab_size=256)), anchors=6, gamma=2.0, chunk=16)
SOFT = dataclasses.replace(SETUP, soft=0.5)


def make_target_of(seed: int = 0, dtype: Any = jnp.float32) -> Target:
    params = jax.tree.map(lambda x: x.astype(dtype), init_target(CONFIG, jax.random.key(seed)))
    return Target(CONFIG, SETUP.target, params, ByteTokenizer(), "tiny")


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target_of()


def talk(lengths: list[int], seed: int = 0) -> Corpus:
    rng = np.random.default_rng(seed)
    return corpus.pack(
        [Example(rng.integers(4, 256, n).astype(np.int32), np.arange(n) >= n // 2, "", 0.0) for n in lengths]
    )


TALK = talk([5, 12, 8, 7, 16, 6, 9])


def rounded(states: Any) -> np.ndarray:
    return np.asarray(states, np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)


def test_stored_states_are_the_online_ones_rounded_to_bfloat16(tmp_path: Path, target: Target) -> None:
    """Bit for bit, at the shapes of training."""
    Plan(tmp_path, target, SOFT, TALK, DATA).write()
    store = open_store(tmp_path, target, SOFT, TALK)
    for width, rows in ((8, [0, 2, 3, 5]), (16, [1, 4]), (16, [6, 6])):
        batch = TALK.batch(rows, width)
        taps, last = jax.jit(step.target_states, static_argnums=0)(SOFT, target.params, batch)
        stored, final = store.read(np.array(rows), width)
        assert stored.dtype == ml_dtypes.bfloat16 and stored.shape == taps.shape
        assert final is not None and last is not None
        for found, online in ((stored, taps), (final, last)):
            assert np.array_equal(found.view(np.uint16), np.where(batch.valid[..., None], rounded(online), 0))
        assert np.abs(np.asarray(last)).max() > 0.1


def test_reading_takes_any_shape_of_rows_and_any_width(tmp_path: Path, target: Target) -> None:
    Plan(tmp_path, target, SETUP, TALK, DATA).write()
    store = open_store(tmp_path, target, SETUP, TALK)
    flat, final = store.read(np.array([4, 1]), 16)
    assert final is None
    nested, _ = store.read(np.array([[4], [1]]), 24)
    assert nested.shape == (2, 1, 24, 64)
    assert np.array_equal(nested[:, 0, :16], flat) and not nested[:, 0, 16:].any()
    cut, _ = store.read(np.array([4]), 5)
    assert np.array_equal(cut[0], flat[0, :5])


def test_another_split_and_order_of_the_same_conversations_is_served(tmp_path: Path, target: Target) -> None:
    Plan(tmp_path, target, SETUP, TALK, DATA).write()
    order = np.array([6, 0, 3])
    whole, _ = open_store(tmp_path, target, SETUP, TALK).read(order, 16)
    part, _ = open_store(tmp_path, target, SETUP, TALK.rows(order)).read(np.arange(3), 16)
    assert np.array_equal(whole, part)
    other = corpus.join([TALK, talk([9, 4], seed=1)])
    with pytest.raises(ConfigError, match="2 of 9 conversations are missing"):
        open_store(tmp_path, target, SETUP, other)


def test_an_offline_step_is_an_online_step(tmp_path: Path, target: Target) -> None:
    """With a target in bfloat16 nothing is rounded, so the losses are the same to the last bit."""
    short = make_target_of(dtype=jnp.bfloat16)
    Plan(tmp_path, short, SOFT, TALK, DATA).write()
    store = open_store(tmp_path, short, SOFT, TALK)
    draft = init_params(SETUP.draft.config, jax.random.key(1))
    item = next(pipeline.batches(TALK, DATA, accumulate=1, seed=0, store=store))
    offline = jax.tree.map(lambda x: x[0], item.batch)
    online = TALK.batch(item.rows[0], item.width)
    anchors = sample_anchors(jax.random.key(0), jnp.asarray(online.supervised), 6)

    def loss(batch: step.Batch) -> float:
        return float(step.predict(SOFT, short.params, draft, batch, *anchors)[1].loss)

    assert loss(online) == loss(offline) > 0
    offline.features[:] = 0
    assert loss(online) != loss(offline)


# --- writing --------------------------------------------------------------------------------------------


class Killed(BaseException):
    pass


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("moment", range(1, 10))
def test_a_killed_command_continues_to_the_same_store(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """Killed at every write in turn (three batches, three files), with half of it done."""
    Plan(tmp_path / "whole", target, SOFT, TALK, DATA).write()
    folder = tmp_path / "killed"
    writes = 0
    real: Callable[..., None] = features._add

    def add(path: Path, parts: list) -> None:
        nonlocal writes
        writes += 1
        if writes == moment:
            data = b"".join(bytes(part) for part in parts)
            real(path, [data[: len(data) // 2]])
            raise Killed
        real(path, parts)

    monkeypatch.setattr(features, "_add", add)
    with pytest.raises(Killed):
        Plan(folder, target, SOFT, TALK, DATA).write()
    monkeypatch.setattr(features, "_add", real)
    plan = Plan(folder, target, SOFT, TALK, DATA)
    assert plan.conversations == len(TALK) - len(plan._done) > 0
    plan.write()
    assert content(folder) == content(tmp_path / "whole")
    done = Plan(folder, target, SOFT, TALK, DATA)
    assert (done.conversations, done.needed) == (0, 0)


def test_records_without_their_states_do_not_count(tmp_path: Path, target: Target) -> None:
    """What a power cut can leave of a disk that writes out of order."""
    Plan(tmp_path, target, SETUP, TALK, DATA).write()
    with (tmp_path / "features.bin").open("r+b") as file:
        file.truncate(128 * 20)
    with pytest.raises(ConfigError, match="4 of 7 conversations are missing"):  # 20 = 5 + 8 + 7
        open_store(tmp_path, target, SETUP, TALK.rows(np.arange(7)))


def test_a_torn_end_is_no_harm_to_what_is_complete(tmp_path: Path, target: Target) -> None:
    Plan(tmp_path, target, SETUP, TALK, DATA).write()
    whole, _ = open_store(tmp_path, target, SETUP, TALK).read(np.arange(7), 16)
    for name, torn in (("features.bin", 333), ("rows.bin", 7)):
        with (tmp_path / name).open("ab") as file:
            file.write(b"x" * torn)
    assert np.array_equal(open_store(tmp_path, target, SETUP, TALK).read(np.arange(7), 16)[0], whole)


def test_new_conversations_are_added_and_repeated_ones_written_once(tmp_path: Path, target: Target) -> None:
    Plan(tmp_path, target, SOFT, TALK, DATA).write()
    before = open_store(tmp_path, target, SOFT, TALK).read(np.arange(7), 16)
    size = (tmp_path / "features.bin").stat().st_size
    more = corpus.join([talk([9, 4], seed=1), TALK, TALK])
    plan = Plan(tmp_path, target, SETUP, more, DATA)  # soft labels no longer: the last states are kept up
    assert plan.conversations == 2 and plan.positions == 13
    assert plan.needed == 13 * 2 * (64 + 32)
    plan.write()
    assert (tmp_path / "features.bin").stat().st_size == size + 13 * 2 * 64
    assert (
        open_store(tmp_path, target, SETUP, more).read(np.array([0]), 16)[1] is None
    )  # nobody asks for them
    after = open_store(tmp_path, target, SOFT, more)
    for rows in (np.arange(2, 9), np.arange(9, 16)):
        assert all(np.array_equal(a, b) for a, b in zip(before, after.read(rows, 16), strict=True))


def test_the_size_is_said_and_a_small_disk_refused(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=63 * 128))
    plan = Plan(tmp_path / "a" / "b", target, SETUP, TALK, DATA)
    assert plan.positions == 63 == TALK.length.sum() and plan.needed == 63 * 128
    text = plan.announcement()
    assert "63 positions" in text and "2 taps in bfloat16" in text and "GiB" in text
    assert not (tmp_path / "a").exists()
    with pytest.raises(ConfigError, match=r"b: features take .* GiB are free: .*features.store"):
        Plan(tmp_path / "a" / "b", target, SOFT, TALK, DATA)


# --- what is refused ------------------------------------------------------------------------------------


def test_states_of_something_else_are_refused_by_name(tmp_path: Path, target: Target) -> None:
    Plan(tmp_path, target, SETUP, TALK, DATA).write()
    other_taps = dataclasses.replace(SETUP, draft=DFlash(draft_config(vocab_size=256, taps=(0, 2))))
    tokenizer = dataclasses.replace(target, tokenizer=ByteTokenizer(260))
    cases: dict[str, tuple[Target, step.Setup]] = {
        "target": (make_target_of(1), SETUP),
        "taps": (target, other_taps),
        "dtype": (make_target_of(dtype=jnp.bfloat16), SETUP),
        "tokenizer": (tokenizer, SETUP),
        "final": (target, SOFT),
    }
    for name, (wrong, setup) in cases.items():
        with pytest.raises(ConfigError, match=rf"index.json: {name} is .*features.store"):
            open_store(tmp_path, wrong, setup, TALK)
        with pytest.raises(ConfigError, match=rf"index.json: {name} is"):
            Plan(tmp_path, wrong, setup, TALK, DATA)


def test_what_is_no_store_is_refused(tmp_path: Path, target: Target) -> None:
    with pytest.raises(ConfigError, match="no store of features: write it with `python -m train features`"):
        open_store(tmp_path, target, SETUP, TALK)
    for text in ("{", "[]", "{}", '{"version": 1}'):
        (tmp_path / "index.json").write_text(text)
        with pytest.raises(ConfigError, match=r"index.json: is no index"):
            open_store(tmp_path, target, SETUP, TALK)
    (tmp_path / "index.json").write_text('{"version": 9, "origin": {}}')
    with pytest.raises(ConfigError, match="version is 9, not 1"):
        open_store(tmp_path, target, SETUP, TALK)


def test_the_targets_digest_is_of_its_weights_and_shape_not_of_its_dtype(target: Target) -> None:
    digest = features.target_digest(target)
    assert digest == features.target_digest(make_target_of(dtype=jnp.bfloat16))
    assert digest != features.target_digest(make_target_of(1))
    changed = dataclasses.replace(CONFIG, rope=dataclasses.replace(CONFIG.rope, type="linear", factor=2.0))
    assert digest != features.target_digest(dataclasses.replace(target, config=changed))
    params = jax.tree.map(lambda x: x, target.params)
    params["norm"]["weight"] = params["norm"]["weight"] * 1.1
    assert digest != features.target_digest(dataclasses.replace(target, params=params))


# --- the command ----------------------------------------------------------------------------------------


def test_the_command_writes_both_sides_of_the_split(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    lines = [
        {"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": "answer"}]}
        for n in range(12)
    ]
    (tmp_path / "conversations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(features.build, "load_target", lambda settings: target)
    settings = Settings(
        "tiny", "tiny", data=Data(max_length=64, tokens=128, held_out=0.2), run=Run(folder=tmp_path)
    )
    made = dataclasses.replace(settings, model=dataclasses.replace(settings.model, layers=1, block_size=4))
    assert features.run(made, Screen()) == 0
    said = capsys.readouterr().out
    assert "features of 12 conversations" in said and "--features.source offline" in said
    setup = features.build.make_setup(made, target, features.build.draft_config(made, target))
    for side in corpus.load(made, target.tokenizer)[:2]:
        stored, _ = open_store(tmp_path / "features", target, setup, side).read(np.arange(len(side)), 64)
        assert np.abs(stored.astype(np.float32)).max() > 0
    assert features.run(made, Screen()) == 0
    assert "features of 0 conversations (12 are there already)" in capsys.readouterr().out


assert DRAFT.taps == SETUP.draft.config.taps == (1, 2)  # the sizes above count on two taps
