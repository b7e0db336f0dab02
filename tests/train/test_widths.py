"""Widths: who goes where, and that little is padding on lengths as conversations have them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from train import widths
from train.settings import Data


def data(**changes: Any) -> Data:
    return Data(**{"max_length": 3072, "tokens": 24_576, **changes})


def lengths(kind: str, count: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    drawn = {
        "uniform": rng.uniform(32, 3072, count),
        "chat": rng.lognormal(np.log(500), 0.7, count),
        "two kinds": np.where(
            rng.random(count) < 0.3, rng.normal(1800, 400, count), rng.normal(180, 60, count)
        ),
        "one length": np.full(count, 230),
    }[kind]
    return np.clip(drawn, 20, 3072).astype(np.int32)


@pytest.mark.parametrize("kind", ["uniform", "chat", "two kinds", "one length"])
@pytest.mark.parametrize("multiple", [1, 8])
def test_padding_is_under_15_percent_on_realistic_lengths(kind: str, multiple: int) -> None:
    found = lengths(kind, 5000)
    made = widths.buckets(found, data(), 2, multiple)
    assert widths.padding(found, made) < widths.PADDING
    assert len(made) <= widths.MOST_WIDTHS
    held = sum(int(found[bucket.members].sum()) for bucket in made)
    positions = sum(bucket.width * len(bucket.members) for bucket in made)
    assert widths.padding(found, made) == pytest.approx(1 - held / positions)
    assert held == found.sum()


def test_the_fewest_widths_that_suffice_are_chosen() -> None:
    assert [bucket.width for bucket in widths.buckets(lengths("one length", 500), data())] == [232]
    two = np.repeat([100, 1000], 400).astype(np.int32)
    assert len(widths.buckets(two, data())) == 2
    assert len(widths.buckets(lengths("uniform", 5000), data())) > 4


def test_chosen_widths_are_the_best_of_their_number() -> None:
    """Against all pairs of widths."""
    found = np.random.default_rng(1).integers(1, 100, 60)
    two = list(widths._choices(found, 3072))[1]

    def positions(narrow: int) -> int:
        return int(np.where(found <= narrow, narrow, 104).sum())

    assert two[1] == 104
    assert positions(two[0]) == min(positions(narrow) for narrow in range(8, 104, 8))


def test_everyone_is_in_one_bucket_that_holds_them_and_fills_a_step() -> None:
    found = lengths("chat", 3000)
    for accumulate, multiple in ((1, 1), (4, 3)):
        made = widths.buckets(found, data(widths=(256, 512, 1024, 2048, 3072)), accumulate, multiple)
        everyone = np.concatenate([bucket.members for bucket in made])
        assert np.array_equal(np.sort(everyone), np.arange(3000))
        for bucket in made:
            assert (found[bucket.members] <= bucket.width).all()
            assert len(bucket.members) >= accumulate * bucket.rows
            assert bucket.rows == 24_576 // bucket.width // multiple * multiple


def test_too_few_long_ones_are_joined_by_the_longest_of_the_shorter() -> None:
    found = np.array([5, 3, 8, 7, 6, 4, 16, 2], np.int32)
    rules = data(max_length=16, widths=(8, 16), tokens=48)  # 6 rows of 8, 3 of 16
    narrow, wide = widths.buckets(found[:7].repeat(2), rules)
    assert wide.width == 16 and sorted(found[:7].repeat(2)[wide.members]) == [8, 16, 16]
    assert narrow.width == 8 and len(narrow.members) == 11
    # 5 short ones would be left of 8: all go where the long one is
    (only,) = widths.buckets(found, rules)
    assert only.width == 16 and len(only.members) == 8


def test_a_corpus_smaller_than_a_step_is_one_bucket_of_its_own_width() -> None:
    found = np.array([5, 6, 7], np.int32)
    (only,) = widths.buckets(found, data(max_length=64, widths=(8, 64), tokens=128))
    assert only.width == 8 and only.rows == 16 and only.members.tolist() == [0, 1, 2]


def test_rows_are_a_multiple_of_the_devices_even_where_tokens_are_too_few() -> None:
    found = np.full(100, 60, np.int32)
    (only,) = widths.buckets(found, data(max_length=64, widths=(64,), tokens=128), 1, 8)
    assert only.rows == 8
