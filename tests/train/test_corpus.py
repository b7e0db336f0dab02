"""From conversation files to arrays, and the split into trained on and held out."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_jax.config import ConfigError
from dflash_jax.tokenizer import ByteTokenizer
from train import corpus
from train.conversations import Example
from train.settings import Data, Run, Settings


def example(prompt: list[int], answer: list[int], temperature: float = 0.0) -> Example:
    supervised = np.arange(len(prompt) + len(answer)) >= len(prompt)
    return Example(np.array([*prompt, *answer], np.int32), supervised, str(prompt), temperature)


def settings(folder: Path, **data: Any) -> Settings:
    fields: dict[str, Any] = {"max_length": 64, "tokens": 128, "held_out": 0.2}
    return Settings("tiny", "tiny", data=Data(**{**fields, **data}), run=Run(folder=folder))


def write(path: Path, talks: list[tuple[str, str]], **more: Any) -> None:
    lines = [
        {"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}], **more}
        for a, b in talks
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_batches_are_padded_cut_and_of_any_shape() -> None:
    made = corpus.pack([example([1, 2], [3, 4, 5]), example([1, 2, 3], [7, 8], 0.5)])
    batch = made.batch([[0], [1]], 6)
    assert batch.tokens.tolist() == [[[1, 2, 3, 4, 5, 0]], [[1, 2, 3, 7, 8, 0]]]
    assert batch.valid.sum(-1).tolist() == [[5], [5]]
    assert [np.nonzero(row)[0].tolist() for row in batch.supervised[:, 0]] == [[2, 3, 4], [3, 4]]
    assert batch.features is None and batch.tokens.dtype == np.int32
    short = made.batch([0], 4)
    assert short.tokens.tolist() == [[1, 2, 3, 4]] and short.valid.all()
    assert made.starts().tolist() == [2, 3]
    assert made.temperature.tolist() == [0.0, 0.5]


def test_joined_corpora_keep_their_rows() -> None:
    parts = [corpus.pack([example([1], [2, 3])]), corpus.pack([example([4, 5], [6] * 5, 0.5)])]
    joined = corpus.join(parts)
    assert joined.tokens.tolist() == [[1, 2, 3, 0, 0, 0, 0], [4, 5, 6, 6, 6, 6, 6]]
    assert joined.length.tolist() == [3, 7] and joined.supervised.sum(1).tolist() == [2, 5]


def test_the_digest_changes_with_whatever_is_trained_on() -> None:
    first, second = example([1, 2], [3, 4, 5]), example([1, 2, 3], [7, 8])
    others = [
        [second, first],
        [first],
        [first, example([1, 2, 3], [7, 9])],
        [first, example([1, 2], [3, 7, 8])],
        [first, Example(second.tokens[:4], second.supervised[:4], "", 0.0)],
    ]
    digests = [corpus.pack(rows).digest() for rows in [[first, second], *others]]
    assert len(set(digests)) == len(digests)
    assert corpus.pack([first, second]).digest() == digests[0]


def test_load_counts_what_it_drops_and_cuts(tmp_path: Path) -> None:
    long = "y" * 100
    talks = [(f"question {n}", f"answer {n}") for n in range(40)] + [("a", long), (long, "never seen")]
    write(tmp_path / "conversations.jsonl", talks, temperature=0.5)
    training, held, report = corpus.load(settings(tmp_path), ByteTokenizer())
    assert report["conversations"] == 42
    assert report["dropped"] == 1  # the answer lies beyond max_length
    assert report["cut"] == 1
    assert report["training"] + report["held_out"] == 41 == len(training) + len(held)
    assert report["tokens"] == training.length.sum()
    assert report["supervised"] == training.supervised.sum()
    assert max(training.length.max(), held.length.max()) == 64 == training.tokens.shape[1]
    assert report["sources"] == [""]
    assert report["greedy"] == 0 and np.unique(training.temperature).tolist() == [0.5]
    json.dumps(report)
    for made in (training, held):
        for tokens, supervised, length in zip(made.tokens, made.supervised, made.length, strict=True):
            text, answer = bytes(tokens[:length].tolist()), bytes(tokens[supervised].tolist())
            assert text.startswith(b"user: ") and answer == text.partition(b"assistant: ")[2]


def test_answers_to_one_prompt_stay_on_one_side_and_held_out_ones_stay_out(tmp_path: Path) -> None:
    def prompts(number: int) -> tuple[set[bytes], set[bytes]]:
        talks = [(f"question {n // 2}", f"answer {n}") for n in range(2 * number)]
        write(tmp_path / "conversations.jsonl", talks)
        training, held, _ = corpus.load(settings(tmp_path), ByteTokenizer())
        assert len(training) + len(held) == 2 * number
        sides = [
            {bytes(t[: t.tolist().index(10)].tolist()) for t in made.tokens} for made in (training, held)
        ]
        assert not sides[0] & sides[1]
        return sides[0], sides[1]

    training, held = prompts(100)
    assert 0.1 < len(held) / 100 < 0.3
    more_training, more_held = prompts(120)
    assert held < more_held and training < more_training


def test_one_prompt_is_held_out_even_where_the_share_is_less(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "conversations.jsonl", [(f"q{n}", "answer") for n in range(8)])
    with caplog.at_level(logging.WARNING, "train"):
        training, held, _ = corpus.load(settings(tmp_path, held_out=1e-9), ByteTokenizer())
    assert (len(training), len(held)) == (7, 1)
    assert "one is held out all the same, which may be trained on" in caplog.text


def test_files_that_give_nothing_to_train_on_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "conversations.jsonl"
    write(path, [("x" * 80, "answer")])
    with pytest.raises(ConfigError, match=r"conversations.jsonl: none of 1 .*data.max_length"):
        corpus.load(settings(tmp_path), ByteTokenizer())
    write(path, [("q", f"answer {n}") for n in range(4)])
    with pytest.raises(ConfigError, match=r"conversations.jsonl: all conversations have the same prompt"):
        corpus.load(settings(tmp_path), ByteTokenizer())


def test_too_much_padding_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "conversations.jsonl", [(f"q{n}", "a" * (n % 30)) for n in range(80)])
    with caplog.at_level(logging.WARNING, "train"):
        report = corpus.load(settings(tmp_path), ByteTokenizer())[2]
    assert not caplog.records and report["padding"] < 0.15
    with caplog.at_level(logging.WARNING, "train"):
        report = corpus.load(settings(tmp_path, widths=(64,)), ByteTokenizer())[2]
    assert report["padding"] > 0.15
    assert "leave out data.widths" in caplog.text
