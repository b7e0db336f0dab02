"""Conversations as arrays: what synthesis writes and a step reads.

Every conversation is one prompt and one answer; only the answer (with its end-of-turn token) is
supervised. Batches are cut to few widths, so that short conversations do not pay for long ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflash_jax.config import ConfigError
from train.step import Batch


@dataclass(frozen=True)
class Corpus:
    """tokens [N, W] i32 (0 beyond `length`), answer [N]: position of the first answer token, length [N],
    temperature [N] f32: how the answer was drawn, 0 for greedy."""

    tokens: np.ndarray
    answer: np.ndarray
    length: np.ndarray
    temperature: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, index: np.ndarray) -> Corpus:
        return Corpus(self.tokens[index], self.answer[index], self.length[index], self.temperature[index])

    def batch(self, index: np.ndarray, width: int) -> Batch:
        """These conversations, cut or padded to `width` positions."""
        tokens = self.tokens[index, :width].astype(np.int32)
        tokens = np.pad(tokens, ((0, 0), (0, width - tokens.shape[1])))
        position = np.arange(width)[None]
        valid = position < self.length[index, None]
        return Batch(tokens, valid, valid & (position >= self.answer[index, None]))


def corpus(conversations: Sequence[tuple[Sequence[int], Sequence[int], float]]) -> tuple[Corpus, int]:
    """From (prompt tokens, answer tokens, temperature). Answers of fewer than two tokens have no block
    and are dropped; the second result counts them."""
    kept = [c for c in conversations if len(c[1]) >= 2]
    if not kept:
        raise ConfigError("no conversation has an answer of two tokens or more: nothing to train on")
    width = max(len(prompt) + len(answer) for prompt, answer, _ in kept)
    tokens = np.zeros((len(kept), width), np.int32)
    for row, (prompt, answer, _) in zip(tokens, kept, strict=True):
        row[: len(prompt) + len(answer)] = [*prompt, *answer]
    starts = np.array([len(prompt) for prompt, _, _ in kept], np.int32)
    lengths = np.array([len(prompt) + len(answer) for prompt, answer, _ in kept], np.int32)
    temperatures = np.array([temperature for _, _, temperature in kept], np.float32)
    return Corpus(tokens, starts, lengths, temperatures), len(conversations) - len(kept)


def join(parts: Sequence[Corpus]) -> Corpus:
    width = max(part.tokens.shape[1] for part in parts)
    tokens = [np.pad(part.tokens, ((0, 0), (0, width - part.tokens.shape[1]))) for part in parts]
    return Corpus(
        np.concatenate(tokens),
        np.concatenate([part.answer for part in parts]),
        np.concatenate([part.length for part in parts]),
        np.concatenate([part.temperature for part in parts]),
    )


def save(path: Path, data: Corpus) -> None:
    """Token ids as the smallest unsigned type that holds them."""
    small = np.uint16 if data.tokens.max(initial=0) < 1 << 16 else np.int32
    np.savez_compressed(path, tokens=data.tokens.astype(small), answer=data.answer.astype(np.int32),
                        length=data.length.astype(np.int32), temperature=data.temperature)  # fmt: skip


def load(path: Path) -> Corpus:
    with np.load(path) as file:
        return Corpus(file["tokens"].astype(np.int32), file["answer"], file["length"], file["temperature"])


def split(data: Corpus, held_out: float, seed: int) -> tuple[Corpus, Corpus]:
    """(training, held-out) conversations. Answers to one prompt stay on one side."""
    prompts = [row[:n].tobytes() for row, n in zip(data.tokens, data.answer, strict=True)]
    names = sorted(set(prompts))
    order = np.random.default_rng(seed).permutation(len(names))
    held = {names[i] for i in order[: max(1, round(held_out * len(names)))]}
    away = np.array([prompt in held for prompt in prompts])
    return data.rows(np.nonzero(~away)[0]), data.rows(np.nonzero(away)[0])


def epochs(
    data: Corpus, widths: Sequence[int], tokens: int, seed: int
) -> Iterator[tuple[int, int, np.ndarray]]:
    """(epoch, width, row numbers) without end. A conversation goes to the smallest width that holds it
    (the largest cuts it); every batch of a width has max(1, tokens // width) rows, all shuffled anew each
    epoch. What does not fill a batch waits for the next epoch's shuffle."""
    assert list(widths) == sorted(widths)
    bucket = np.minimum(np.searchsorted(widths, data.length), len(widths) - 1)
    if not any((bucket == i).sum() >= max(1, tokens // width) for i, width in enumerate(widths)):
        raise ConfigError(f"{len(data)} conversations do not fill a batch of {tokens} tokens")
    generator = np.random.default_rng(seed)
    epoch = 0
    while True:
        batches = []
        for i, width in enumerate(widths):
            rows = max(1, tokens // width)
            members = generator.permutation(np.nonzero(bucket == i)[0])
            full = len(members) - len(members) % rows
            batches += [(width, part) for part in members[:full].reshape(-1, rows)]
        for i in generator.permutation(len(batches)):
            yield epoch, *batches[i]
        epoch += 1
