"""How wide a conversation is padded: few widths, as each compiles a program, and little padding."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from train.settings import Data

PADDING = 0.15  # share of a batch's positions that may be padding
MOST_WIDTHS = 12


@dataclass(frozen=True, eq=False)
class Bucket:
    """The conversations of one width. rows: of a microbatch. members: row numbers of the corpus."""

    width: int
    rows: int
    members: np.ndarray


def buckets(lengths: np.ndarray, data: Data, accumulate: int = 1, multiple: int = 1) -> list[Bucket]:
    """Every conversation in one bucket, most in the narrowest width that holds them.

    A bucket never holds less than a step takes (accumulate * rows), so none waits for epochs until it is
    full: the widest is filled up with the longest of the narrower ones, and so on down; what then remains
    joins the width above it. (A corpus smaller than a step is one bucket, repeated within the step.)
    data.widths None: the fewest widths whose padding stays under PADDING, MOST_WIDTHS at most.
    """
    if data.widths is not None:
        return _assign(lengths, data.widths, data.tokens, accumulate, multiple)
    best: list[Bucket] = []
    for widths in _choices(lengths, data.max_length):
        found = _assign(lengths, widths, data.tokens, accumulate, multiple)
        if not best or padding(lengths, found) < padding(lengths, best):
            best = found
        if padding(lengths, best) < PADDING:
            break
    return best


def padding(lengths: np.ndarray, found: Sequence[Bucket]) -> float:
    """Share of the positions that are padding."""
    positions = sum(bucket.width * len(bucket.members) for bucket in found)
    held = sum(int(np.minimum(lengths[bucket.members], bucket.width).sum()) for bucket in found)
    return 1 - held / positions


def _assign(
    lengths: np.ndarray, widths: Sequence[int], tokens: int, accumulate: int, multiple: int
) -> list[Bucket]:
    order = np.argsort(lengths, kind="stable")
    begins = [0, *np.searchsorted(lengths[order], widths[:-1], side="right").tolist()]
    made: list[Bucket] = []
    end = len(order)
    for width, begin in zip(reversed(widths), reversed(begins), strict=True):
        if begin >= end:
            continue
        rows = max(multiple, tokens // width // multiple * multiple)
        start = max(0, min(begin, end - accumulate * rows))
        members = order[start:end]
        if made and len(members) < accumulate * rows:
            last = made.pop()
            width, rows, members = last.width, last.rows, np.concatenate([members, last.members])
        made.append(Bucket(width, rows, np.sort(members)))
        end = start
    return made[::-1]


def _choices(lengths: np.ndarray, most: int) -> Iterator[tuple[int, ...]]:
    """The best 1, 2, ... widths for these lengths. Widths are multiples of a power of two, which is 1/96 to
    1/48 of the longest: found by dynamic programming over the last width but one."""
    longest = int(lengths.max())
    grain = max(8, 1 << int(math.log2(max(1, longest / 48))))
    edges = grain * np.arange(-(-longest // grain) + 1)
    below = np.searchsorted(np.sort(lengths), edges, side="right")
    # cost[i, j]: positions that the lengths above edge i take at width edge j
    cost = np.where(edges[:, None] < edges, edges * (below - below[:, None]), np.inf)
    total = cost[0]
    before: list[np.ndarray] = []
    for count in range(1, min(MOST_WIDTHS, len(edges) - 1) + 1):
        chosen = [len(edges) - 1]
        for step in reversed(before):
            chosen.append(int(step[chosen[-1]]))
        assert len(chosen) == count
        yield tuple(sorted({min(int(edges[i]), most) for i in chosen if i}))
        before.append(np.argmin(total[:, None] + cost, axis=0))
        total = np.min(total[:, None] + cost, axis=0)
