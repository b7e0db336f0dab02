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

from dflash_jax import decode, gated_delta, pair, tokenizer
from dflash_jax.config import ConfigError
from dflash_jax.gated_delta import CHUNK
from dflash_jax.state import AUTOREGRESSIVE
from dflash_jax.targets import FAMILIES, abstract_params
from dflash_jax.terminal import Screen
from dflash_jax.testing import random_params
from dflash_jax.weights import hf
from train import byte_vocabulary, language_model, plain_text
from train.exercises import exercises
from train.settings import LanguageModel, Run, Settings

TINY = LanguageModel(
    layers=2, hidden_size=24, heads=4, kv_heads=2, head_dim=8, intermediate_size=40, length=96, rows=8,
    steps=100, rate=1e-2, interval=2, key_dim=6, value_dim=8, experts=4, expert_size=12,
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


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"family": "qwen3_5", "interval": 3},
            r"language_model\.interval is 3, but there are 2 layers: lower it",
        ),
        ({"family": "qwen3_5", "value_heads": 3}, r"language_model: .* 3 value heads over 2 key heads"),
        ({"family": "qwen3_moe", "experts_per_token": 5}, r"language_model: .* 5 experts per token of 4"),
        ({"kv_heads": 3}, r"language_model: .* 4 query heads over 3 key/value heads"),
    ],
)
def test_shapes_that_do_not_fit_are_named(changes: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        language_model.target_config(dataclasses.replace(TINY, **changes))


def test_a_setting_that_is_no_size_is_named() -> None:
    with pytest.raises(ConfigError, match="steps must be positive"):
        LanguageModel(steps=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_training_reaches_every_parameter(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two updates over rows of two chunks of the delta rule: finite, and nothing stands still. One solve for a
    whole row would cost the square of its length."""
    sizes = [0]
    solve = gated_delta._solve
    monkeypatch.setattr(gated_delta, "_solve", lambda q, *rest: sizes.append(q.shape[1]) or solve(q, *rest))
    wanted = dataclasses.replace(TINY, family=family, steps=2, length=2 * CHUNK, rows=4)
    config = language_model.target_config(wanted)
    texts = [np.random.default_rng(i).integers(0, 256, 90).tolist() for i in range(4)]
    params, loss = language_model.fit(config, wanted, texts)
    assert 5 < loss < 6  # log 262 is 5.57
    assert max(sizes) == (CHUNK if config.recurrent else 0)
    before = language_model.start(config, wanted.seed)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        assert bool(np.isfinite(leaf).all()), path
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), params, before)
    assert min(jax.tree.leaves(moved)) > 0, moved


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


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_the_command_makes_a_target_that_learned_its_text(tmp_path: Path, family: str) -> None:
    text = tmp_path / "text.jsonl"
    asked, answer = "Say it.", "one fox jumps over my lazy dog"
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    text.write_text(json.dumps({"messages": messages}) + "\n")
    settings = Settings(
        name="tiny",
        target="",
        run=Run(folder=tmp_path),
        language_model=dataclasses.replace(TINY, text=(text,), family=family),
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
    (messages,) = plain_text.paragraphs(text)
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
        plain_text.read([path])


def test_rows_begin_with_conversations_and_see_all_of_them() -> None:
    texts = [[i, i, i] for i in range(5)]
    rows = language_model.batches(texts, rows=5, length=3, seed=0)
    first = next(rows)
    assert first.shape == (5, 4)
    assert sorted(first[:, 0].tolist()) == list(range(5))
    assert (first[:, 3] == byte_vocabulary.END_OF_TEXT).all()


def test_code_loses_its_indentation_and_nothing_else() -> None:
    (messages,) = plain_text.paragraphs(
        "    def a_method(self, of, several, values):\n        return values\n\n"
    )
    asked, answer = (message["content"] for message in messages)
    assert f"{asked} {answer}" == "def a_method(self, of, several, values):\n    return values"


def test_the_standard_library_is_text() -> None:
    found = plain_text.library_sources()
    assert {"textwrap.py", "dataclasses.py"} <= {path.name for path in found}
    texts = plain_text.read(found)
    assert len(texts) > 1000 and any("def dedent(text)" in m["content"] for one in texts for m in one)


def test_user_turns_that_are_kept_from_training_are_in_no_trained_conversation(tmp_path: Path) -> None:
    texts = plain_text.asked([(f"turn {i % 7}", f"answer {i}") for i in range(20)])
    trained, held_out = plain_text.split(texts, 3, seed=0)
    turns = {messages[0]["content"] for messages in trained}
    assert len(held_out) == len(set(held_out)) == 3 and len(turns) == 4 and not turns & set(held_out)
    assert plain_text.split(texts, 0, seed=0) == (texts, [])
    path = tmp_path / "run" / "prompts.jsonl"
    plain_text.write_prompts(path, held_out)
    assert [json.loads(line)["prompt"] for line in path.read_text().splitlines()] == held_out
    with pytest.raises(ConfigError, match=r"language_model\.prompts is 7, but the text has no more"):
        plain_text.split(texts, 7, seed=0)


def test_exercises_are_the_same_every_time_and_of_all_kinds() -> None:
    made = exercises(600, seed=1)
    assert made == exercises(600, seed=1) != exercises(600, seed=2)
    assert {asked.split()[0] for asked, _ in made} == {"Count", "Which", "Tell", "Spell", "Say", "What"}
    assert len(set(made)) > 300
    assert ("Count from one to four.", "one, two, three, four.") in exercises(5000, 0)
