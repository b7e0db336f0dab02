"""The order in which conversations are trained on: by Grain, endless, and exact when it is continued.

Each width has its own shuffled stream, cut into steps of fixed shape; a step takes from the streams in
proportion. What does not fill a step at the end of an epoch goes into the next one together with the first
of the next epoch, so every conversation is seen once an epoch of its width, and none is dropped.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grain
import numpy as np

from dflash_jax.config import ConfigError
from train import widths
from train.corpus import Corpus
from train.features import Store
from train.settings import Data
from train.step import Batch


@dataclass(frozen=True, eq=False)
class Item:
    """What one update reads. epoch: counted from 0. rows [M, B] i32: numbers of the conversations.
    batch: NumPy arrays [M, B, width, ...], its features from the store when there is one."""

    epoch: int
    width: int
    rows: np.ndarray
    batch: Batch


def steps_per_epoch(corpus: Corpus, data: Data, accumulate: int, multiple: int = 1) -> int:
    """Updates in which as many conversations are read as there are, rounded up."""
    found = widths.buckets(corpus.length, data, accumulate, multiple)
    return math.ceil(sum(len(bucket.members) / (accumulate * bucket.rows) for bucket in found))


def batches(
    corpus: Corpus,
    data: Data,
    *,
    accumulate: int,
    seed: int,
    multiple: int = 1,
    store: Store | None = None,
) -> Batches:
    """An endless iterator over Item: accumulate (M) microbatches of one width, each of max(multiple, the
    most rows within data.tokens that `multiple` devices can share equally) conversations."""
    return Batches(corpus, data, accumulate, seed, multiple, store)


class Batches(Iterator[Item]):
    """See `batches`."""

    def __init__(
        self, corpus: Corpus, data: Data, accumulate: int, seed: int, multiple: int, store: Store | None
    ):
        found = widths.buckets(corpus.length, data, accumulate, multiple)
        self._about = _digest(corpus, found, accumulate, seed)
        self._corpus, self._store = corpus, store
        self._epoch = steps_per_epoch(corpus, data, accumulate, multiple)
        streams = [
            grain.MapDataset.range(sys.maxsize).map(_Stream(bucket, accumulate, (seed, number)))
            for number, bucket in enumerate(found)
        ]
        shares = [len(bucket.members) / (accumulate * bucket.rows) for bucket in found]
        order = grain.MapDataset.mix(streams, shares).map_with_index(self._item)
        # A store is on a disk: one thread reads ahead while a step runs. Items can be large, so only two.
        ahead = grain.ReadOptions(
            num_threads=int(store is not None), prefetch_buffer_size=2 * (store is not None)
        )
        self._iterator = iter(order.to_iter_dataset(ahead))

    def __next__(self) -> Item:
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        """What set_state needs to continue with the next item: small, and can be JSON."""
        return {"position": self._iterator.get_state()["next_index"], "data": self._about}

    def set_state(self, state: dict[str, Any]) -> None:
        """Raises ConfigError when the position is one among other conversations or other batches."""
        if state["data"] != self._about:
            raise ConfigError(
                "the conversations or the batches (data, run.accumulate, run.seed, devices) are not those of "
                "the checkpoint: restore them, or begin a new run with run.init_from"
            )
        self._iterator.set_state({"next_index": int(state["position"])})

    def _item(self, index: int, step: tuple[int, np.ndarray]) -> Item:
        width, rows = step
        batch = self._corpus.batch(rows, width)
        if self._store is not None:
            features, final = self._store.read(rows, width)
            batch = dataclasses.replace(batch, features=features, final=final)
        return Item(index // self._epoch, width, rows, batch)


class _Stream:
    """One width's conversations, shuffled anew again and again, end to end: step k -> (width, rows [M, B]).

    (Grain's own shuffle walks a cipher over 65,536 numbers for each that it draws: 2 ms for one of 20, 0.3 ms
    for one of 100.)
    """

    def __init__(self, bucket: widths.Bucket, accumulate: int, seed: tuple[int, int]):
        self._bucket, self._shape, self._seed = bucket, (accumulate, bucket.rows), seed
        self._epoch = functools.lru_cache(2)(
            self._permutation
        )  # a step touches two at most, or many short ones

    def __call__(self, step: int) -> tuple[int, np.ndarray]:
        size, count = math.prod(self._shape), len(self._bucket.members)
        first, last = step * size, (step + 1) * size - 1
        epochs = range(first // count, last // count + 1)
        drawn = np.concatenate([self._epoch(epoch) for epoch in epochs])[first - epochs[0] * count :][:size]
        return self._bucket.width, drawn.astype(np.int32).reshape(self._shape)

    def _permutation(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([*self._seed, epoch]).permutation(self._bucket.members)


def _digest(corpus: Corpus, found: list[widths.Bucket], accumulate: int, seed: int) -> str:
    shapes = [[bucket.width, bucket.rows, len(bucket.members)] for bucket in found]
    about = [corpus.digest(), shapes, accumulate, seed]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()
