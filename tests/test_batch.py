"""Rows of a batch are strangers: each decodes as it would alone (case 20)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from decoding import BLOCKS, BUDGET, PROMPTS, SEEDS, autoregressive, pair, warm

from dflash_jax import decode
from dflash_jax.generation import Generation
from dflash_jax.sampling import sampling


def together(prompts: list[list[int]], **request: Any) -> Generation:
    return decode.complete(pair(), prompts, BLOCKS, max_new_tokens=BUDGET, **request)


def assert_rows_equal_single_runs(batch: Generation, **request: Any) -> None:
    """Tokens, the acceptance of every round, and why it ended."""
    for row, prompt in enumerate(PROMPTS):
        alone = together([prompt], seeds=[SEEDS[row]], **request)
        assert batch.tokens[row] == alone.tokens[0], f"row {row}"
        assert batch.committed[row] == alone.committed[0], f"row {row}"
        assert batch.finish_reasons[row] == alone.finish_reasons[0], f"row {row}"


@pytest.mark.parametrize("sampled", [False, True])
def test_a_row_decodes_as_it_would_alone(sampled: bool) -> None:
    how = warm() if sampled else sampling()
    batch = together(PROMPTS, seeds=SEEDS, how=how)
    assert batch.tokens == autoregressive(sampled)
    accepted = [sum(row) - len(row) for row in batch.committed]
    assert sum(accepted) > 10 and len(set(map(tuple, batch.committed))) > 5, "rows went different ways"
    assert_rows_equal_single_runs(batch, how=how)


def test_a_row_that_stops_early_leaves_the_others_alone() -> None:
    stop = autoregressive()[2][4]
    batch = together(PROMPTS, seeds=SEEDS, stop_ids=(stop,))
    assert len(batch.tokens[2]) <= 5 < max(map(len, batch.tokens))
    assert "stop" in batch.finish_reasons
    assert_rows_equal_single_runs(batch, stop_ids=(stop,))


def test_order_does_not_matter() -> None:
    order = np.array([5, 2, 7, 0, 1, 6, 3, 4])
    how = warm()
    batch = together([PROMPTS[i] for i in order], seeds=[SEEDS[i] for i in order], how=how)
    assert batch.tokens == [autoregressive(sampled=True)[i] for i in order]


def test_a_row_has_its_own_seed() -> None:
    """Equal prompts and seeds give equal rows; another seed gives another text."""
    seeds = [3, 3, 4, 3, 5, 3, 6, 7]
    rows = together([PROMPTS[0]] * 8, seeds=seeds, how=warm()).tokens
    assert rows[0] == rows[1] == rows[3] == rows[5]
    assert len({tuple(row) for row in rows}) == 5
