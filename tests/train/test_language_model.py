"""A tiny target: from text to a folder that everything else loads."""

from __future__ import annotations

import dataclasses
import io
import json
from contextlib import redirect_stdout
from pathlib import Path

import jax
import numpy as np
import pytest

from dflash_jax import decode, pair, tokenizer
from dflash_jax.config import ConfigError
from dflash_jax.state import AUTOREGRESSIVE
from dflash_jax.targets import FAMILIES, abstract_params
from dflash_jax.terminal import Screen
from dflash_jax.testing import random_params
from dflash_jax.weights import hf
from train import byte_vocabulary, language_model
from train.exercises import exercises
from train.settings import LanguageModel, Run, Settings

TINY = LanguageModel(
    layers=2, hidden_size=24, heads=4, kv_heads=2, head_dim=8, intermediate_size=40, length=96, rows=8,
    steps=100, rate=1e-2,
)  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_target_is_read_back(tmp_path: Path, family: str) -> None:
    config = language_model.target_config(dataclasses.replace(TINY, family=family))
    params = jax.tree.map(np.asarray, random_params(abstract_params(config)))
    hf.save_target(tmp_path, config, params, np.float32)
    assert hf.target_config(tmp_path) == config
    read = hf.load_target(tmp_path, config, abstract_params(config), np.dtype(np.float32))
    jax.tree.map(np.testing.assert_array_equal, read, params)


def test_an_unknown_family_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"family 'mamba' is not supported: one of llama"):
        language_model.fit(
            language_model.target_config(dataclasses.replace(TINY, family="mamba")), TINY, [[1]]
        )


def test_the_byte_vocabulary_is_bytes_turns_and_a_template(tmp_path: Path) -> None:
    byte_vocabulary.write(tmp_path)
    words = tokenizer.from_folder(tmp_path)
    text = "naïve → 9\n"
    assert words.encode(text) == list(text.encode())
    assert words.decode(list(text.encode())) == text
    assert words.vocab_size == byte_vocabulary.SIZE
    assert words.stop_ids == (byte_vocabulary.END_OF_TURN,)
    assert words.encode("<|mask|>") == [byte_vocabulary.MASK]
    turn, end = byte_vocabulary.TURN, byte_vocabulary.END_OF_TURN
    assert words.chat([{"role": "user", "content": "a"}]) == [
        *(turn, *b"user\na", end, *b"\n"),
        *(turn, *b"assistant\n"),
    ]


def test_the_command_makes_a_target_that_learned_its_text(tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    asked, answer = "Say it.", "one fox jumps over my lazy dog"
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    text.write_text(json.dumps({"messages": messages}) + "\n")
    settings = Settings(
        name="tiny",
        target="",
        run=Run(folder=tmp_path),
        language_model=dataclasses.replace(TINY, text=(text,)),
    )
    said = io.StringIO()
    with Screen() as screen, redirect_stdout(said):
        assert language_model.run(settings, screen) == 0
    assert str(tmp_path / "target") in said.getvalue() and "synthesize" in said.getvalue()

    loaded = pair.load(str(tmp_path / "target"), "none", dtype="float32")
    prompt = loaded.target.tokenizer.chat(messages[:1])
    out = decode.complete(
        loaded.models, [prompt], AUTOREGRESSIVE, max_new_tokens=40, stop_ids=loaded.target.stop_ids
    )
    assert loaded.target.tokenizer.decode(out.tokens[0]) == answer
    assert out.finish_reasons == ["stop"]


def test_paragraphs_become_conversations() -> None:
    text = "Short.\n\nThe first words of this paragraph are what the user says here.\n\n  \n\nAnother, too short."
    (messages,) = language_model.paragraphs(text)
    assert [message["role"] for message in messages] == ["user", "assistant"]
    asked, answer = (message["content"] for message in messages)
    assert f"{asked} {answer}" == "Short.\nThe first words of this paragraph are what the user says here."
    assert asked == "Short.\nThe first words of"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", '{"words": "x"}\n', "a.jsonl: line 1: messages is missing"),
        ("a.jsonl", '{"text": 3}\n', "a.jsonl: line 1: text is 3"),
        ("a.txt", "too short", "hold no paragraph of 48 characters"),
    ],
)
def test_text_that_cannot_be_used(tmp_path: Path, name: str, content: str, says: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ConfigError, match=says):
        language_model.read([path])


def test_rows_begin_with_conversations_and_see_all_of_them() -> None:
    texts = [[i, i, i] for i in range(5)]
    rows = language_model.batches(texts, rows=5, length=3, seed=0)
    first = next(rows)
    assert first.shape == (5, 4)
    assert sorted(first[:, 0].tolist()) == list(range(5))
    assert (first[:, 3] == byte_vocabulary.END_OF_TEXT).all()


def test_exercises_are_the_same_every_time_and_of_all_kinds() -> None:
    made = exercises(600, seed=1)
    assert made == exercises(600, seed=1) != exercises(600, seed=2)
    assert {asked.split()[0] for asked, _ in made} == {"Count", "Which", "Tell", "Spell", "Say", "What"}
    assert len(set(made)) > 300
    assert ("Count from one to four.", "one, two, three, four.") in exercises(5000, 0)
