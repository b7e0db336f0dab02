"""The input pipeline: what each epoch sees, fixed shapes, and exact continuation."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from typing import Any

import jax
import numpy as np
import pytest

from dflash_jax.config import ConfigError
from train import corpus, pipeline
from train.conversations import Example
from train.corpus import Corpus
from train.pipeline import Item
from train.settings import Data

DATA = Data(max_length=16, widths=(4, 8, 16), tokens=32)  # 8, 4, 2 rows


def made(lengths: list[int]) -> Corpus:
    """Row n holds n + 1 everywhere."""
    return corpus.pack(
        [
            Example(np.full(length, n + 1, np.int32), np.arange(length) > 0, "", 0.0)
            for n, length in enumerate(lengths)
        ]
    )


TALK = made([3] * 19 + [6] * 9 + [8] * 4 + [12] * 5)


def items(count: int, talk: Corpus = TALK, **changes: Any) -> list[Item]:
    options: dict[str, Any] = {"accumulate": 1, "seed": 0, **changes}
    return list(islice(pipeline.batches(talk, DATA, **options), count))


def same(first: list[Item], second: list[Item]) -> bool:
    if [(a.epoch, a.width) for a in first] != [(b.epoch, b.width) for b in second]:
        return False
    return all(
        np.array_equal(a, b)
        for one, two in zip(first, second, strict=True)
        for a, b in zip(
            jax.tree.leaves((one.rows, one.batch)), jax.tree.leaves((two.rows, two.batch)), strict=True
        )
    )


def test_a_batch_holds_the_rows_that_it_names_in_a_width_that_holds_them() -> None:
    for item in items(40, accumulate=2):
        assert item.rows.shape == (2, 32 // item.width) and item.rows.dtype == np.int32
        assert item.batch.tokens.shape == item.batch.valid.shape == (*item.rows.shape, item.width)
        assert np.array_equal(item.batch.tokens[..., 0], item.rows + 1)
        assert np.array_equal(item.batch.valid.sum(-1), TALK.length[item.rows])
        assert np.array_equal(item.batch.supervised.sum(-1), TALK.length[item.rows] - 1)


@pytest.mark.parametrize(("accumulate", "multiple"), [(1, 1), (2, 1), (1, 4)])
def test_nobody_is_starved_and_nobody_preferred(accumulate: int, multiple: int) -> None:
    epochs = 12
    count = epochs * pipeline.steps_per_epoch(TALK, DATA, accumulate, multiple)
    seen = items(count, accumulate=accumulate, multiple=multiple)
    times = Counter(int(row) for item in seen for row in item.rows.ravel())
    assert set(times) == set(range(len(TALK)))
    assert min(times.values()) >= epochs - 1 and max(times.values()) - min(times.values()) <= 2
    assert seen[0].epoch == 0 and seen[-1].epoch == epochs - 1
    first = {int(row) for item in seen[: count // epochs] for row in item.rows.ravel()}
    assert len(first) > 0.9 * len(TALK)


def test_each_width_is_one_permutation_after_the_other() -> None:
    talk = made([3] * 24)  # 3 steps of 8
    order = np.concatenate([item.rows.ravel() for item in items(9, talk)]).reshape(3, 24)
    assert pipeline.steps_per_epoch(talk, DATA, 1) == 3
    for epoch in order:
        assert sorted(epoch) == list(range(24))
    assert not np.array_equal(order[0], order[1]) and not np.array_equal(order[1], order[2])
    assert not np.array_equal(order[0], np.arange(24))


def test_what_does_not_fill_a_step_is_in_the_next() -> None:
    talk = made([3] * 20)  # 2.5 steps of 8
    order = np.concatenate([item.rows.ravel() for item in items(5, talk)])
    assert sorted(order[:20]) == sorted(order[20:]) == list(range(20))
    assert pipeline.steps_per_epoch(talk, DATA, 1) == 3


def test_the_seed_decides_the_order() -> None:
    assert same(items(10), items(10))
    assert not same(items(10), items(10, seed=1))


def test_few_conversations_repeat_within_a_step() -> None:
    (item,) = items(1, made([3, 3]))
    assert Counter(item.rows.ravel().tolist()) == {0: 4, 1: 4}


@pytest.mark.parametrize("stop", [0, 1, 7, 30])
def test_a_restored_iterator_continues_exactly(stop: int) -> None:
    whole = items(stop + 12)
    killed = pipeline.batches(TALK, DATA, accumulate=1, seed=0)
    list(islice(killed, stop))
    state = json.loads(json.dumps(killed.get_state()))
    fresh = pipeline.batches(TALK, DATA, accumulate=1, seed=0)
    fresh.set_state(state)
    assert same(list(islice(fresh, 12)), whole[stop:])
    assert same(list(islice(killed, 12)), whole[stop:])  # asking moves nothing
    killed.set_state(state)  # and back
    assert same(list(islice(killed, 12)), whole[stop:])


def test_a_position_among_other_batches_is_refused() -> None:
    state = pipeline.batches(TALK, DATA, accumulate=1, seed=0).get_state()
    longer = made([3] * 20 + [6] * 9 + [8] * 4 + [12] * 5)
    others: list[tuple[Corpus, dict[str, Any]]] = [
        (longer, {}), (TALK, {"accumulate": 2}), (TALK, {"seed": 1}), (TALK, {"multiple": 3}),
    ]  # fmt: skip
    for talk, changes in others:
        options: dict[str, Any] = {"accumulate": 1, "seed": 0, **changes}
        with pytest.raises(ConfigError, match="the conversations or the batches"):
            pipeline.batches(talk, DATA, **options).set_state(state)
    # rows are the same on 2 devices: 8, 4, 2
    pipeline.batches(TALK, DATA, accumulate=1, seed=0, multiple=2).set_state(state)


class Echo:
    """A store whose states say which row and width they were read for."""

    def read(self, rows: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
        features = np.broadcast_to(rows[..., None, None], (*rows.shape, width, 2))
        return features, features + 1


def test_features_come_from_the_store_and_survive_a_restore() -> None:
    store: Any = Echo()
    seen = items(20, store=store)
    for item in seen:
        assert item.batch.features.shape == (*item.batch.tokens.shape, 2)
        assert np.array_equal(item.batch.features[..., 0, 0], item.rows)
        assert np.array_equal(item.batch.final[..., 0, 0], item.rows + 1)
    iterator = pipeline.batches(TALK, DATA, accumulate=1, seed=0, store=store)
    list(islice(iterator, 5))  # the thread has read on by now
    state = iterator.get_state()
    again = pipeline.batches(TALK, DATA, accumulate=1, seed=0, store=store)
    again.set_state(state)
    assert same(list(islice(again, 10)), seen[5:15])
