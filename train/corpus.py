"""Conversations as arrays: read, encoded, cut, and split into those trained on and those held out."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from dflash_jax.config import ConfigError
from dflash_jax.tokenizer import ByteTokenizer, Tokenizer
from train import conversations, widths
from train.conversations import Example
from train.settings import Settings
from train.step import Batch

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Corpus:
    """tokens [N, W] i32 (0 beyond `length`), supervised [N, W] bool: what the draft learns to predict (at
    least two tokens a row), length [N] i32, temperature [N] f32: how the answer was drawn, 0 for greedy,
    nan for unknown."""

    tokens: np.ndarray
    supervised: np.ndarray
    length: np.ndarray
    temperature: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, index: ArrayLike) -> Corpus:
        index = np.asarray(index)
        return Corpus(self.tokens[index], self.supervised[index], self.length[index], self.temperature[index])

    def batch(self, index: ArrayLike, width: int) -> Batch:
        """These conversations [..., width], padded or (where longer) cut."""
        index = np.asarray(index)
        kept = min(width, self.tokens.shape[1])
        tokens = np.zeros((*index.shape, width), np.int32)
        supervised = np.zeros((*index.shape, width), bool)
        tokens[..., :kept] = self.tokens[index, :kept]
        supervised[..., :kept] = self.supervised[index, :kept]
        return Batch(tokens, np.arange(width) < self.length[index][..., None], supervised)

    def starts(self) -> np.ndarray:
        """[N] first supervised position: where decoding would begin."""
        return np.argmax(self.supervised, axis=1).astype(np.int32)

    def digest(self) -> str:
        """sha256 of what is trained on, in this order."""
        found = hashlib.sha256(np.asarray(self.tokens.shape, "<i8").tobytes())
        for part in (self.tokens.astype("<i4", copy=False), self.supervised, self.length.astype("<i4")):
            found.update(np.ascontiguousarray(part).data)
        return found.hexdigest()


def pack(examples: Sequence[Example]) -> Corpus:
    """One row per example, in order."""
    length = np.array([len(example.tokens) for example in examples], np.int32)
    tokens = np.zeros((len(examples), length.max(initial=0)), np.int32)
    supervised = np.zeros(tokens.shape, bool)
    for i, example in enumerate(examples):
        tokens[i, : length[i]] = example.tokens
        supervised[i, : length[i]] = example.supervised
    return Corpus(
        tokens, supervised, length, np.array([example.temperature for example in examples], np.float32)
    )


def join(parts: Sequence[Corpus]) -> Corpus:
    """One corpus after the other."""
    width = max(part.tokens.shape[1] for part in parts)

    def wide(rows: np.ndarray) -> np.ndarray:
        return np.pad(rows, ((0, 0), (0, width - rows.shape[1])))

    return Corpus(
        np.concatenate([wide(part.tokens) for part in parts]),
        np.concatenate([wide(part.supervised) for part in parts]),
        np.concatenate([part.length for part in parts]),
        np.concatenate([part.temperature for part in parts]),
    )


def load(settings: Settings, tokenizer: Tokenizer | ByteTokenizer) -> tuple[Corpus, Corpus, dict[str, Any]]:
    """(training, held-out, report) from the files of settings.data. All answers to one prompt are on one
    side, and stay there when conversations are added. Where data.held_out of the prompts is none, one is held out
    that may not stay there, and a warning says so.

    The report has counts, what made the conversations ("" where a line does not say), and the share of padding; a
    warning is logged when that exceeds widths.PADDING.
    Raises ConfigError that names the file for what cannot be read, and when there is nothing to train on
    or nothing to hold out.
    """
    data = settings.data
    files = [settings.within(file) for file in data.files]
    found = [conversation for file in files for conversation in conversations.read(file)]
    kept: list[Example] = []
    cut = 0
    for number, conversation in enumerate(found):
        if number % 1000 == 0:
            _log.info("encoding conversations: %d of %d", number, len(found))
        example = conversations.encode(conversation, tokenizer, data.turns, data.reasoning)
        if example is None:
            continue
        short = _cut(example, data.max_length)
        if short.supervised.sum() >= 2:
            kept.append(short)
            cut += short is not example
    names = ", ".join(map(str, files))
    if not kept:
        raise ConfigError(
            f"{names}: none of {len(found)} conversations has an answer of two tokens within data.max_length"
        )
    away = _held_out([example.prompt for example in kept], data.held_out, data.seed)
    if away.all():
        raise ConfigError(
            f"{names}: all conversations have the same prompt: one must be held out, add others"
        )
    whole = pack(kept)
    training, held = whole.rows(np.nonzero(~away)[0]), whole.rows(np.nonzero(away)[0])
    found_buckets = widths.buckets(training.length, data, settings.run.accumulate)
    padding = widths.padding(training.length, found_buckets)
    if padding > widths.PADDING:
        _log.warning(
            "%.0f %% of what training reads is padding: %s",
            100 * padding,
            "leave out data.widths, and they are chosen from the lengths"
            if data.widths is not None
            else "there are too few conversations to sort them by length, lower data.tokens",
        )
    report = {
        "files": [file.name for file in files],
        "sources": sorted({conversation.source for conversation in found}),
        "conversations": len(found),
        "dropped": len(found) - len(kept),
        "cut": cut,
        "training": len(training),
        "held_out": len(held),
        "tokens": int(training.length.sum()),
        "supervised": int(training.supervised.sum()),
        "greedy": int((training.temperature == 0).sum()),
        "widths": [bucket.width for bucket in found_buckets],
        "padding": round(padding, 4),
    }
    return training, held, report


def _cut(example: Example, most: int) -> Example:
    if len(example.tokens) <= most:
        return example
    return Example(example.tokens[:most], example.supervised[:most], example.prompt, example.temperature)


def _held_out(prompts: Sequence[str | bytes], share: float, seed: int) -> np.ndarray:
    """[N] bool. A hash of the prompt decides, so that a longer file holds out what a shorter one did: a
    draft that is trained on cannot be measured on what an earlier run has seen. One prompt at least."""

    def rank(prompt: str | bytes) -> float:
        text = prompt.encode("utf-8", "surrogatepass") if isinstance(prompt, str) else prompt
        found = hashlib.sha256(b"%d " % seed + text).digest()
        return int.from_bytes(found[:8], "big") / 2**64

    ranks = np.array([rank(prompt) for prompt in prompts])
    if ranks.min() > share:
        _log.warning(
            "data.held_out %g of so few prompts is none: one is held out all the same, which may be trained on when "
            "conversations are added: raise data.held_out",
            share,
        )
    return ranks <= max(share, ranks.min())
