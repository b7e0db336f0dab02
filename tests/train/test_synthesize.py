"""Conversations that a tiny target makes alone: what they are, and what a restart continues."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import folders
import pytest

from dflash_jax import pair
from dflash_jax.config import ConfigError
from dflash_jax.state import Models
from dflash_jax.terminal import Screen
from dflash_jax.tokenizer import ByteTokenizer
from train import synthesize
from train.conversations import Conversation, encode, read
from train.prompts import BEGINNINGS
from train.settings import Run, Settings, Synthesize

# Every eighth byte ends a turn too: a random target says <|im_end|> too rarely.
STOPS = [folders.IM_END, *range(0, 256, 8)]
RECIPE = Synthesize(
    conversations=20, rows=8, prompt_tokens=24, answer_tokens=12, bare=1.0, temperatures=(0.5, 0.9)
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = folders.target(tmp_path_factory.mktemp("target") / "target")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": STOPS}))
    return folder


@pytest.fixture(scope="module")
def target(folder: Path) -> pair.Target:
    return pair.load(str(folder)).target


def make(target: pair.Target, known: Sequence[Conversation] = (), **changes: Any) -> synthesize.Iterator:
    models = Models(target.params, target=target.module)
    return synthesize.conversations(models, target.tokenizer, dataclasses.replace(RECIPE, **changes), known)


def settings(folder: Path, tmp_path: Path, **changes: Any) -> Settings:
    recipe = dataclasses.replace(RECIPE, **changes)
    return Settings("tiny", str(folder), synthesize=recipe, run=Run(folder=tmp_path))


def test_each_prompt_is_answered_greedily_and_by_sampling(target: pair.Target) -> None:
    first, second = islice(make(target), 2)
    for batch in (first, second):
        assert [c.temperature == 0 for c in batch] == [True] * 4 + [False] * 4
        assert all(0.5 <= c.temperature <= 0.9 for c in batch[4:] if c.temperature is not None)
        assert [c.prompt for c in batch[:4]] == [c.prompt for c in batch[4:]]
        for c in batch:
            assert c.tokens is not None and 1 <= len(c.tokens) <= 12
            assert c.finished == (c.tokens[-1] in target.stop_ids)
            example = encode(c, target.tokenizer)  # the tokens spell the answer and follow its prompt
            assert (example is None) == (len(c.tokens) < 2)
    assert len({c.prompt for c in [*first, *second]}) == 8
    assert any(a.tokens != b.tokens for a, b in zip(first[:4], first[4:], strict=True))
    assert any(not c.finished for c in first) and any(c.finished for c in first)


def test_a_greedy_row_is_what_the_target_says_at_temperature_zero(target: pair.Target) -> None:
    warm = next(make(target, temperatures=(0.8, 0.9)))
    cold = next(make(target, greedy=1.0))
    greedy = {c.prompt: c.tokens for c in cold}
    assert len(cold) == 8 and {c.temperature for c in cold} == {0.0}
    for c in warm[:4]:
        assert greedy[c.prompt] == c.tokens


def test_what_follows_a_restart_is_new_and_a_function_of_what_is_there(
    target: pair.Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = next(make(target))
    again, after = next(make(target)), next(make(target, known=first))
    assert [c.line() for c in again] == [c.line() for c in first]
    assert [c.line() for c in next(make(target, known=first))] == [c.line() for c in after]
    assert not {c.prompt for c in first} & {c.prompt for c in after}
    assert [c.line() for c in next(make(target, seed=1))] != [c.line() for c in first]

    # New because the seed moves on, and not only because repetitions are thrown away.
    sampled: list[str] = []
    user_turns = synthesize.user_turns

    def watched(*arguments: Any) -> list[str]:
        turns = user_turns(*arguments)
        sampled.extend(turns)
        return turns

    monkeypatch.setattr(synthesize, "user_turns", watched)
    next(make(target, known=first))
    assert not {c.prompt for c in first} & set(sampled)


def test_beginnings_are_continued(target: pair.Target) -> None:
    batch = next(make(target, bare=0.0, prompt_tokens=20))
    starts = {start.rstrip(" ") for kind in BEGINNINGS.values() for start in kind}
    short = tuple(start for start in starts if len(start) < 20)
    assert all(c.prompt.startswith(tuple(s.strip() for s in short)) for c in batch)


def test_a_target_that_never_ends_a_turn_is_said(tmp_path: Path) -> None:
    silent = pair.load(str(folders.target(tmp_path / "x", says=65))).target
    with pytest.raises(ConfigError, match=r"no new user turn in 160 tries: raise synthesize\.prompt_tokens"):
        next(make(silent))


def test_budgets_beyond_the_target_are_refused(target: pair.Target) -> None:
    with pytest.raises(ConfigError, match=r"need 543 positions .* but the target has 512"):
        next(make(target, answer_tokens=500))


def test_bytes_without_stop_ids_end_turns_with_their_line(target: pair.Target) -> None:
    batch = next(make(dataclasses.replace(target, tokenizer=ByteTokenizer(260))))
    assert all("\n" not in c.messages[1]["content"] and "\n" not in c.prompt for c in batch)
    assert all(c.finished == (c.tokens is not None and c.tokens[-1] == 10) for c in batch)


# --- the command ----------------------------------------------------------------------------------------


def test_a_killed_run_continues_without_a_repetition(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = settings(folder, tmp_path)
    path = tmp_path / "conversations.jsonl"
    assert (
        synthesize.run(
            dataclasses.replace(wanted, synthesize=dataclasses.replace(RECIPE, seconds=0)), Screen()
        )
        == 0
    )
    first = path.read_bytes()
    assert len(read(path)) == 8  # the time is looked at between batches
    with path.open("ab") as file:
        file.write(first[:100])
    capsys.readouterr()
    assert synthesize.run(wanted, Screen()) == 0
    assert path.read_bytes().startswith(first)
    conversations = read(path)
    assert len(conversations) == 20
    assert len({(c.prompt, c.temperature) for c in conversations}) == 20
    assert {c.source for c in conversations} == {"synthesize"}
    out, err = capsys.readouterr()
    assert f"20 conversations in {path}, 12 of them new" in out and "next: python -m train fit" in out
    assert "12 of 12 conversations" in err and "answer tokens/s" in err
    before = path.read_bytes()
    assert synthesize.run(wanted, Screen()) == 0  # nothing is missing
    assert path.read_bytes() == before and "0 of them new" in capsys.readouterr().out
    for name, value in {"seed": 1, "greedy": 0.25, "temperatures": (0.5, 0.8)}.items():
        with pytest.raises(ConfigError, match=rf"conversations\.jsonl: was made with {name} "):
            synthesize.run(settings(folder, tmp_path, **{name: value}), Screen())
