"""Lines of conversations, their tokens and masks, and the file that survives a kill."""

from __future__ import annotations

import json
from pathlib import Path

import folders
import numpy as np
import pytest

from dflash_jax.config import ConfigError
from dflash_jax.journal import Journal
from dflash_jax.tokenizer import ByteTokenizer, Tokenizer, from_folder
from train.conversations import Conversation, encode, end_of_turn, read

SYSTEM = {"role": "system", "content": "brief"}
ASK, MORE = {"role": "user", "content": "hé?"}, {"role": "user", "content": "and?"}
SAY, LAST = {"role": "assistant", "content": "añ"}, {"role": "assistant", "content": "ok"}
# As Qwen3's: an answer that is followed by another question loses its reasoning.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return of_template(tmp_path_factory.mktemp("chatml"), folders.CHATML)


def of_template(folder: Path, template: str) -> Tokenizer:
    folders.write_tokenizer(folder, template)
    return from_folder(folder)


def supervised(conversation: Conversation, tokenizer: Tokenizer | ByteTokenizer, **how: object) -> list[str]:
    """The supervised stretches, as text with special tokens."""
    example = encode(conversation, tokenizer, **how)  # type: ignore[arg-type]
    assert example is not None
    edges = np.flatnonzero(np.diff(np.pad(example.supervised.astype(int), 1)))
    return [
        tokenizer.decode(example.tokens[a:b].tolist(), skip_special=False)
        for a, b in zip(edges[::2], edges[1::2], strict=True)
    ]


# --- masks ----------------------------------------------------------------------------------------------


def test_answers_and_their_ends_are_supervised_and_nothing_else(chatml: Tokenizer) -> None:
    talk = Conversation((SYSTEM, ASK, SAY, MORE, LAST))
    assert supervised(talk, chatml) == ["ok<|im_end|>"]
    assert supervised(talk, chatml, turns="all") == ["añ<|im_end|>", "ok<|im_end|>"]
    example = encode(talk, chatml, "all")
    assert example is not None and example.prompt == "hé?" and np.isnan(example.temperature)
    text = chatml.render(talk.messages, False)
    assert chatml.decode(example.tokens.tolist(), skip_special=False) == text.removesuffix("\n")
    assert example.tokens.dtype == np.int32 and example.supervised.dtype == np.bool_


def test_known_tokens_follow_the_prompt_of_decoding(chatml: Tokenizer) -> None:
    tokens = (*b"ok", folders.IM_END)
    talk = Conversation((ASK, SAY, MORE, LAST), tokens, temperature=0.5)
    for turns, stretches in (("last", ["ok<|im_end|>"]), ("all", ["añ<|im_end|>", "ok<|im_end|>"])):
        example = encode(talk, chatml, turns)  # type: ignore[arg-type]
        assert example is not None and example.temperature == 0.5
        assert example.tokens.tolist() == [*chatml.chat(talk.messages[:-1]), *tokens]
        assert supervised(talk, chatml, turns=turns) == stretches
    # The text alone gives the same here, where there is one way to cut it.
    alone = encode(Conversation(talk.messages), chatml, "all")
    assert alone is not None and alone.tokens.tolist() == example.tokens.tolist()
    assert alone.supervised.tolist() == example.supervised.tolist()


def test_an_answer_that_was_cut_has_no_end(chatml: Tokenizer) -> None:
    assert supervised(Conversation((ASK, LAST), finished=False), chatml) == ["ok"]
    assert supervised(Conversation((ASK, LAST), tuple(b"ok"), finished=False), chatml) == ["ok"]
    assert encode(Conversation((ASK, {"role": "assistant", "content": ""})), chatml) is None  # the end alone
    assert encode(Conversation((ASK, {**LAST, "content": "o"}), tuple(b"o"), finished=False), chatml) is None


@pytest.mark.parametrize(
    ("answer", "left"),
    [
        ("<think>one\ntwo</think>ok", ["ok<|im_end|>"]),
        ("a<think>b</think>c<think>d</think>e", ["a", "c", "e<|im_end|>"]),
        ("opened by the template</think>ok", ["ok<|im_end|>"]),
        ("no reasoning <thin", ["no reasoning <thin<|im_end|>"]),
    ],
)
def test_reasoning_is_masked_on_request(chatml: Tokenizer, answer: str, left: list[str]) -> None:
    talk = Conversation((ASK, {"role": "assistant", "content": answer}))
    assert supervised(talk, chatml, reasoning=False) == left
    assert supervised(talk, chatml) == [f"{answer}<|im_end|>"]
    with_tokens = Conversation(talk.messages, (*answer.encode(), folders.IM_END))
    assert supervised(with_tokens, chatml, reasoning=False) == left


def test_reasoning_that_was_cut_leaves_nothing(chatml: Tokenizer) -> None:
    talk = Conversation((ASK, {"role": "assistant", "content": "<think>on and on"}), finished=False)
    assert encode(talk, chatml, reasoning=False) is None


def test_a_template_that_forgets_reasoning_is_followed(tmp_path: Path) -> None:
    tokenizer = of_template(tmp_path, FORGETFUL)
    first = {"role": "assistant", "content": "<think>x</think>añ"}
    talk = Conversation((ASK, first, MORE, {**LAST, "content": "<think>y</think>ok"}))
    assert supervised(talk, tokenizer, turns="all") == ["añ<|im_end|>", "<think>y</think>ok<|im_end|>"]


def test_a_template_that_hides_where_an_answer_is_is_refused(tmp_path: Path) -> None:
    tokenizer = of_template(
        tmp_path, folders.CHATML.replace("assistant\n{% endif", "assistant\n<think>{% endif")
    )
    talk = Conversation((ASK, LAST), where="file: line 3")
    with pytest.raises(
        ConfigError, match=r"file: line 3: messages\[1\]: the chat template writes this answer"
    ):
        encode(talk, tokenizer)
    assert supervised(Conversation(talk.messages, (*b"ok", folders.IM_END)), tokenizer) == ["ok<|im_end|>"]


def test_tokens_of_another_tokenizer_are_refused(chatml: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="file: line 3: tokens do not spell the answer"):
        encode(Conversation((ASK, LAST), (*b"no", folders.IM_END), where="file: line 3"), chatml)


def test_bytes_without_a_template_end_turns_with_their_line() -> None:
    talk = Conversation((ASK, SAY, MORE, LAST))
    assert supervised(talk, ByteTokenizer(), turns="all") == ["añ\n", "ok\n"]
    assert end_of_turn(ByteTokenizer()) == (ord("\n"),)
    assert supervised(Conversation(talk.messages, (*b"ok", 10)), ByteTokenizer()) == ["ok\n"]
    stops = ByteTokenizer(260, (256,))
    assert end_of_turn(stops) == (256,)
    assert supervised(Conversation(talk.messages, (*b"ok", 256)), stops, turns="all") == ["añ\n", "ok"]


# --- files ----------------------------------------------------------------------------------------------


def test_a_line_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = [
        Conversation((SYSTEM, ASK, SAY), (1, 2), False, 0.25, "synthesize"),
        Conversation((ASK, {"role": "assistant", "content": "two\nlines \u2028 and more"})),
    ]
    path = tmp_path / "x.jsonl"
    Journal(path).append(conversation.line() for conversation in written)
    assert read(path) == written
    assert read(path)[1].where == f"{path}: line 2"


def test_other_spellings_of_a_conversation(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    lines = [
        {"conversations": [ASK, {**LAST, "name": "x"}]},
        {"prompt": "hé?", "response": "ok", "finished": False},
    ]
    path.write_text("\n\n".join(json.dumps(line) for line in lines))
    assert read(path) == [Conversation((ASK, LAST)), Conversation((ASK, LAST), finished=False)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]\n", "line 2 holds a JSON list"),
        ("{'a'}\n", "line 2 is not valid JSON"),
        ('{"messages": [{"ro', "line 2 is cut off: .* continue with the command"),
        ("{}\n", "line 2: messages is missing"),
        (json.dumps({"messages": [ASK]}), "line 2: messages must hold a user's turn and end with an answer"),
        (json.dumps({"messages": [SAY, ASK, LAST]}), "line 2: messages begins with the assistant"),
        (json.dumps({"messages": [SYSTEM, LAST]}), "line 2: messages must hold a user's turn"),
        (json.dumps({"messages": [{"role": "user"}, LAST]}), r"line 2: messages\[0\].content is missing"),
        (json.dumps({"messages": [ASK, LAST], "tokens": [-1]}), "line 2: tokens holds"),
        (json.dumps({"messages": [ASK, LAST], "finish_reason": "eos"}), "line 2: finish_reason is 'eos'"),
    ],
)
def test_what_is_no_conversation_is_named_by_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(f"{Conversation((ASK, LAST)).line()}\n{line}")
    with pytest.raises(ConfigError, match=f"x.jsonl: {message}"):
        read(path)


@pytest.mark.parametrize("size", [10, 100_000])
def test_half_a_line_is_removed_and_what_is_whole_stays(tmp_path: Path, size: int) -> None:
    path = tmp_path / "deep" / "x.jsonl"
    whole = json.dumps({"a": "x" * size})
    Journal(path).append([whole, whole])
    for torn in ("", whole[:-1], '{"a'):
        with path.open("a") as file:
            file.write(torn)
        Journal(path).append([whole])
    assert path.read_text() == f"{whole}\n" * 5
    path.write_text(f"{whole}\n{whole}")  # by hand, without the last newline
    Journal(path).append([whole])
    assert path.read_text() == f"{whole}\n" * 3
    path.write_text(whole[:-1])
    Journal(path)
    assert path.read_text() == ""


def test_a_file_is_replaced_at_once(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "x.jsonl")
    journal.append(["1", "2"])

    def failing():
        yield "3"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        journal.rewrite(failing())
    assert journal.path.read_text() == "1\n2\n"
    journal.rewrite(["2", "1"])
    assert journal.path.read_text() == "2\n1\n" and list(tmp_path.iterdir()) == [journal.path]
