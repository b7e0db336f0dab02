"""The real model through the session and the command line (marker `model`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_jax import pair
from infer.__main__ import main
from infer.chat import Chat
from infer.session import Session
from infer.settings import Settings

pytestmark = pytest.mark.model

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "smollm2_greedy.json").read_text())


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> Session:
    return Session(pair.load(str(smollm2_gguf)))


def test_golden_prompts_and_answers(smollm2: Session) -> None:
    """Prompt tokens of the chat template, and what transformers answers, all rows in one batch."""
    prompts = [smollm2.prompt(case["prompt"]) for case in GOLDEN]
    assert prompts == [case["prompt_tokens"] for case in GOLDEN]
    answers = smollm2.run(prompts, Settings(max_new_tokens=96)).completions
    for answer, case in zip(answers, GOLDEN, strict=True):
        assert answer.tokens == case["new_tokens"]
        assert answer.text == case["text"].removesuffix("<|im_end|>")


def test_an_untrained_draft_changes_nothing(smollm2: Session) -> None:
    drafted = Session(smollm2.pair.with_draft(pair.random_draft(smollm2.pair.target)))
    pieces: list[str] = []
    answer = drafted.complete(
        GOLDEN[0]["prompt"], Settings(max_new_tokens=24), on_text=lambda _, new: pieces.append(new)
    )
    assert answer.tokens == GOLDEN[0]["new_tokens"][:24]
    assert "".join(pieces) == answer.text


def test_turns_equal_a_fresh_reading(smollm2: Session) -> None:
    chat = Chat(smollm2, Settings(max_new_tokens=16))
    chat.say("Name a colour.")
    answer = chat.say("And another one?")
    said = chat.tokens[: -len(answer.tokens)]
    assert smollm2.run([said], Settings(max_new_tokens=16)).completions[0].tokens == answer.tokens


def test_the_command_line_with_the_short_name(
    smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DFLASH_SMOLLM2_GGUF", str(smollm2_gguf))
    case = GOLDEN[1]
    flags = ["--target", "smollm2", "--prompt", case["prompt"], "--max-new-tokens", "12", "--json"]
    assert main(["generate", *flags]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["tokens"] == case["new_tokens"][:12] and answer["target"] == "smollm2"
