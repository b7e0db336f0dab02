"""Answers of a tiny target to prompts of a file: their order, their seeds, and what a restart leaves."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import decoding
import folders
import pytest

from dflash_jax import pair
from dflash_jax.buckets import bucket
from dflash_jax.config import ConfigError
from dflash_jax.sampling import sampling
from dflash_jax.terminal import Screen
from train import regenerate
from train.answer import answer
from train.conversations import Conversation, encode, read
from train.regenerate import Prompt, Speaker
from train.settings import Regenerate, Run, Settings

# Every fourth byte ends a turn too: a random target says <|im_end|> too rarely.
STOPS = [folders.IM_END, *range(0, 256, 4)]
LINES: list[dict[str, Any]] = [
    {"turns": ["one"]},
    {"prompt": "a longer second prompt"},
    {"turns": ["one"]},
    {"messages": [{"role": "system", "content": "brief"}, {"role": "user", "content": "three"}]},
    {"turns": ["4", "5"]},
    {
        "conversations": [
            {"role": "user", "content": "6"},
            {"role": "assistant", "content": "not the target's words"},
            {"role": "user", "content": "7"},
        ]
    },
    {"turns": ["nine" * 200]},
]
ASKED = [
    Prompt(None, ("one",)),
    Prompt(None, (LINES[1]["prompt"],)),
    Prompt("brief", ("three",)),
    Prompt(None, ("4", "5")),
    Prompt(None, ("6", "7")),
    Prompt(None, ("nine" * 200,)),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = folders.target(tmp_path_factory.mktemp("target") / "target")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": STOPS}))
    return folder


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.draft(tmp_path_factory.mktemp("draft") / "draft")


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in LINES))
    return path


def settings(folder: Path, prompts: Path, **changes: Any) -> Settings:
    wanted = Regenerate(**{"prompts": prompts, "rows": 1, "answer_tokens": 4, "temperature": 0.8, **changes})
    return Settings("tiny", str(folder), regenerate=wanted, run=Run(folder=prompts.parent / "run"))


def regenerated(wanted: Settings) -> list[Conversation]:
    assert regenerate.run(wanted, Screen()) == 0
    return read(wanted.within(wanted.regenerate.out))


def questions(conversation: Conversation) -> list[str]:
    return [m["content"] for m in conversation.messages if m["role"] == "user"]


# --- prompts --------------------------------------------------------------------------------------------


def test_prompts_are_read_once_each(asked: Path) -> None:
    assert regenerate.read_prompts(asked) == (ASKED, 1)
    assert regenerate.read_prompts(asked, 3) == (ASKED[:3], 1)
    assert regenerate.read_prompts(asked)[0][1].where == f"{asked}: line 2"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"text": "x"}, "line 1 has neither turns, prompt nor messages"),
        ({"turns": []}, "line 1 has an empty user turn, or none"),
        ({"turns": ["x", " "]}, "line 1 has an empty user turn, or none"),
        ({"turns": "x"}, "line 1: turns is 'x': it must be a list of strings"),
        ({"messages": [{"role": "tool", "content": "x"}]}, r"line 1: messages\[0\].role is 'tool'"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "system", "content": "x"}]}, "is 'system'"),
    ],
)
def test_what_is_no_prompt_is_named_by_line(asked: Path, line: object, message: str) -> None:
    asked.write_text(json.dumps(line))
    with pytest.raises(ConfigError, match=message):
        regenerate.read_prompts(asked)


def test_missing_and_mistaken_files_are_said(folder: Path, asked: Path) -> None:
    with pytest.raises(ConfigError, match=r"regenerate\.prompts is missing"):
        regenerate.run(Settings("tiny", str(folder)), Screen())
    with pytest.raises(ConfigError, match=r"regenerate\.out is the file of prompts"):
        regenerate.run(settings(folder, asked, out=asked), Screen())


# --- answers --------------------------------------------------------------------------------------------


def test_the_answers_have_the_prompts_order(
    folder: Path, asked: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = settings(folder, asked)
    made = regenerated(wanted)
    assert len(made) == 5  # the last prompt does not fit into the target's 512 positions
    for conversation, prompt in zip(made, ASKED, strict=False):
        assert questions(conversation) == list(prompt.turns[: len(questions(conversation))])
        # Turn by turn: every answer but the last ended by itself.
        assert len(questions(conversation)) == len(prompt.turns) or not conversation.finished
    assert made[2].messages[0] == {"role": "system", "content": "brief"}
    assert {c.source for c in made} == {"regenerate"} and {c.temperature for c in made} == {0.8}
    assert not any("not the target's" in c.line() for c in made)
    tokenizer = pair.load(str(folder)).target.tokenizer
    assert all(encode(c, tokenizer) is not None for c in made if len(c.tokens or ()) > 1)
    out = capsys.readouterr().out
    assert "5 conversations" in out and "1 repeated prompts, 1 too long" in out
    assert "train fit, with the same flags and --data.files regenerated.jsonl" in out


def test_an_answer_depends_on_its_prompt_and_the_seed_alone(folder: Path, asked: Path) -> None:
    made = regenerated(settings(folder, asked, max_samples=3))
    backwards = asked.with_name("backwards.jsonl")
    backwards.write_text("".join(f"{json.dumps(line)}\n" for line in LINES[3::-1]))
    together = regenerated(settings(folder, backwards, rows=4, out=Path("together.jsonl")))
    assert [c.tokens for c in together] == [made[i].tokens for i in (2, 0, 1)]
    again = regenerated(settings(folder, asked, max_samples=3, out=Path("again.jsonl"), seed=1))
    assert [c.tokens for c in again] != [c.tokens for c in made]


def test_later_turns_see_the_earlier_answers(folder: Path, asked: Path) -> None:
    talks = [c for c in regenerated(settings(folder, asked)) if len(questions(c)) > 1]
    assert len(talks) > 1
    loaded = pair.load(str(folder))
    for talk in talks:
        prompt = loaded.target.tokenizer.chat(talk.messages[:-1])
        alone = answer(
            loaded.models, [prompt], rows=1, budget=4, how=sampling(0.8, 0.9), stop_ids=loaded.target.stop_ids,
            seeds=[regenerate.seed(0, Prompt(None, tuple(questions(talk))))],
            capacity=bucket(len(prompt) + 4),
        )  # fmt: skip
        assert tuple(alone.tokens[0]) == talk.tokens


def test_a_draft_changes_no_token(folder: Path, draft: Path, asked: Path) -> None:
    alone = regenerated(settings(folder, asked, max_samples=2))
    helped = regenerated(settings(folder, asked, max_samples=2, draft=str(draft), out=Path("helped.jsonl")))
    assert len(helped) == 2 and helped == alone


def test_a_draft_that_is_right_saves_rounds_in_a_batch_that_is_not_full() -> None:
    made = answer(
        decoding.perfect(sampled=True), decoding.PROMPTS[:7], rows=8, budget=decoding.BUDGET,
        how=decoding.warm(), seeds=decoding.SEEDS[:7], stop_ids=(), capacity=64,
    )  # fmt: skip
    assert made.tokens == decoding.autoregressive(sampled=True)[:7]
    assert len(made.finish_reasons) == len(made.committed) == 7
    assert made.tau > 4


def test_batches_are_of_one_number_of_turns_and_begin_with_the_longest(folder: Path) -> None:
    target = pair.load(str(folder))
    speaker = Speaker(target.models, target.target.tokenizer, Regenerate(rows=3))
    prompts = [Prompt(None, ("x" * n,)) for n in (5, 9, 1, 7)] + [Prompt(None, ("x", "y"))]
    sizes = [
        [(len(p.turns), len(p.turns[0])) for p in batch] for batch in regenerate.batches(prompts, speaker)
    ]
    assert sizes == [[(2, 1)], [(1, 9), (1, 7), (1, 5)], [(1, 1)]]


# --- restarts -------------------------------------------------------------------------------------------


class Killed(Exception):
    pass


def test_a_killed_run_continues_and_ends_as_if_it_had_not_been(
    folder: Path, asked: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = regenerated(settings(folder, asked, out=Path("whole.jsonl")))
    wanted = settings(folder, asked)
    path = wanted.within(wanted.regenerate.out)
    answers, calls = regenerate.answers, []

    def dying(speaker: Speaker, batch: Sequence[Prompt], count: regenerate.Count) -> list[Conversation]:
        if len(calls) == 2:
            raise Killed
        calls.append(len(batch))
        return answers(speaker, batch, count)

    with monkeypatch.context() as patch:
        patch.setattr(regenerate, "answers", dying)
        with pytest.raises(Killed):
            regenerate.run(wanted, Screen())
    assert len(read(path)) == sum(calls) < len(whole)
    with path.open("a") as file:
        file.write('{"messages": [{"role": "us')
    capsys.readouterr()
    assert regenerated(wanted) == whole
    assert f"{len(whole) - sum(calls)} of them new" in capsys.readouterr().out
    before = path.read_bytes()
    assert regenerated(wanted) == whole and path.read_bytes() == before
    assert "0 of them new" in capsys.readouterr().out


def test_answers_of_another_target_or_other_sampling_are_not_continued(
    folder: Path, asked: Path, tmp_path: Path
) -> None:
    wanted = settings(folder, asked, max_samples=1)
    made = regenerated(wanted)
    for name, value in (("temperature", 0.5), ("top_p", 1.0), ("seed", 1), ("answer_tokens", 5)):
        with pytest.raises(
            ConfigError, match=rf"regenerated\.jsonl: was made with {name} .*, but this run has"
        ):
            regenerate.run(settings(folder, asked, **{name: value}), Screen())
    other = folders.target(tmp_path / "other", says=65)
    with pytest.raises(ConfigError, match=r"regenerated\.jsonl: was made with target "):
        regenerate.run(settings(other, asked), Screen())
    assert regenerated(wanted) == made


def test_more_samples_and_strangers_find_their_place(folder: Path, asked: Path) -> None:
    wanted = settings(folder, asked, max_samples=1)
    path = wanted.within(wanted.regenerate.out)
    first = regenerated(wanted)
    stranger = Conversation(
        ({"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}), source="me"
    )
    twin = dataclasses.replace(first[0], temperature=0.1)
    path.write_text("".join(f"{c.line()}\n" for c in (stranger, *first, twin)))
    assert regenerated(settings(folder, asked, max_samples=2))[1:] != [stranger, twin]
    made = read(path)
    assert [questions(c) for c in made[:2]] == [["one"], [LINES[1]["prompt"]]]
    assert made[0] == first[0] and made[2:] == [stranger, twin]
