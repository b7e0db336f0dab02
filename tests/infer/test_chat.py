"""Several turns on one state."""

from __future__ import annotations

import dataclasses
import io
import sys
from pathlib import Path

import folders
import pytest

from dflash_jax import decode, pair
from dflash_jax.config import ConfigError
from infer.chat import Chat, converse
from infer.session import Session
from infer.settings import Settings

TURNS = ("hello", "and then?", "why")
HOW = Settings(max_new_tokens=9)


def fresh(session: Session, tokens: list[int], how: Settings) -> list[int]:
    return session.run([tokens], how).completions[0].tokens


@pytest.mark.parametrize(
    "how", [HOW, dataclasses.replace(HOW, temperature=1.0, seed=3)], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("system", [None, "be brief"])
def test_turns_equal_a_fresh_reading_of_the_whole(
    session: Session, system: str | None, how: Settings
) -> None:
    chat = Chat(session, how, system)
    for turn in TURNS:
        answer = chat.say(turn)
        said = chat.tokens[: len(chat.tokens) - len(answer.tokens)]
        assert fresh(session, said, how) == answer.tokens


def test_the_conversation_is_what_the_template_would_write(fluent: Session) -> None:
    """The model's words are plain letters here, so encoding them again gives the same tokens."""
    chat = Chat(fluent, HOW)
    for turn in TURNS:
        chat.say(turn)
    messages = [{"role": "user", "content": TURNS[0]}]
    for turn in TURNS[1:]:
        messages += [{"role": "assistant", "content": "a" * 9}, {"role": "user", "content": turn}]
    words = fluent.pair.target.tokenizer
    assert chat.tokens == words.chat(messages) + [ord("a")] * 9


def test_a_turn_reads_only_what_is_new(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    prefill = decode.prefill

    def counting(models, prompts, *args, **how):
        read.append(len(prompts[0]))
        return prefill(models, prompts, *args, **how)

    monkeypatch.setattr(decode, "prefill", counting)
    chat = Chat(session, HOW)
    for turn in TURNS:
        chat.say(turn)
    frame = "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    words = session.pair.target.tokenizer
    assert read[1:] == [len(words.encode(frame.format(turn))) for turn in TURNS[1:]]


def test_a_stop_string_leaves_a_state_to_go_on_from(fluent: Session) -> None:
    how = dataclasses.replace(HOW, stop=("aaa",))
    chat = Chat(fluent, how)
    for turn in TURNS:
        answer = chat.say(turn)
        assert answer.tokens == [ord("a")] * 3 and answer.finish_reason == "stop"
        said = chat.tokens[: len(chat.tokens) - len(answer.tokens)]
        assert fresh(fluent, said, how) == answer.tokens


def test_the_emitted_end_of_turn_is_the_templates(models: Path) -> None:
    folder = folders.target(models / "silent", says=folders.IM_END)
    session = Session(pair.load(str(folder), str(models / "draft")))
    chat = Chat(session, HOW)
    for turn in TURNS[:2]:
        answer = chat.say(turn)
        assert answer.tokens == [folders.IM_END] and answer.text == ""
    said = [
        {"role": "user", "content": TURNS[0]},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": TURNS[1]},
    ]
    assert chat.tokens == [*session.pair.target.tokenizer.chat(said), folders.IM_END]


def test_a_foreign_end_of_turn_is_not_carried_on(models: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The model ends with <|endoftext|>, the template's turns with <|im_end|>."""
    folder = folders.target(models / "foreign", says=folders.END, eos_token_id=[folders.END])
    session = Session(pair.load(str(folder), str(models / "draft")))
    chat = Chat(session, HOW)
    assert chat.say("hi").tokens == [folders.END]
    chat.say("again")
    assert "the conversation is read again" in caplog.text
    assert folders.END not in chat.tokens[:-1]


def test_a_template_that_rewrites_earlier_turns(models: Path, caplog: pytest.LogCaptureFixture) -> None:
    template = "{{ messages | length }}:" + folders.CHATML
    folder = folders.target(models / "rewriting", says=ord("a"), template=template)
    chat = Chat(Session(pair.load(str(folder), str(models / "draft"))), HOW)
    chat.say("hi")
    answer = chat.say("again")
    assert "the conversation is read again" in caplog.text
    assert answer.tokens == [ord("a")] * 9
    words = chat.session.pair.target.tokenizer
    assert words.decode(chat.tokens[:2]) == "3:"


def test_a_failed_turn_leaves_the_conversation_as_it_was(session: Session) -> None:
    chat = Chat(session, HOW)
    chat.say("hello")
    before = chat.tokens
    with pytest.raises(ConfigError, match=r"the context of .* is 512"):
        chat.say("x" * 600)
    with pytest.raises(ConfigError, match="the message is empty"):
        chat.say("")
    assert chat.tokens == before
    chat.say("go on")
    chat.reset()
    assert chat.tokens == []


def test_a_model_without_a_template_cannot_chat(models: Path) -> None:
    with pytest.raises(ConfigError, match="has no chat template"):
        Chat(Session(pair.load(str(models / "plain"))), HOW)


def test_turns_from_standard_input(
    fluent: Session, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "hi\n\n" + "x" * 600 + "\n/help\nmore\n/reset\nagain\n/quit\nnever\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    converse(Chat(fluent, HOW))
    out, err = capsys.readouterr()
    assert out == ("a" * 9 + "\n") * 3
    assert err.count("[9 tokens, length") == 3 and err.count("error: ") == 1
    assert "/help is not a command: /reset begins a new conversation, /quit leaves" in err
