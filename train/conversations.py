"""Conversations: lines of a JSONL file, and their tokens with the mask of what is supervised.

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}],
     "tokens": [...], "finish_reason": "stop", "temperature": 0.0, "source": "synthesize"}

Only `messages` is needed. `tokens` are the ids of the last answer as the target gave them, its end-of-turn
token included: a text can be cut into tokens in several ways, and decoding meets the target's way. Also
read: `conversations` for `messages` (FORMATS 6), and a pair of `prompt` and `response`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dflash_jax.config import ConfigError
from dflash_jax.tokenizer import ByteTokenizer, Tokenizer
from dflash_jax.weights.fields import MAX_INTEGER, Fields, file_bytes, naming

Words = Tokenizer | ByteTokenizer
Message = Mapping[str, str]

# Reasoning up to the end of a text that was cut inside it, and, where the template itself has opened it,
# from the start.
_REASONING = re.compile(rb"\A(?:(?!<think>).)*?</think>|<think>.*?(?:</think>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Conversation:
    """messages: the last is the assistant's. tokens: its ids, None where only the text is known.
    finished: it ended by itself. temperature: None when unknown. source: what made it. where: file and line,
    for errors."""

    messages: tuple[Message, ...]
    tokens: tuple[int, ...] | None = None
    finished: bool = True
    temperature: float | None = None
    source: str = ""
    where: str = field(default="the conversation", compare=False)

    @property
    def prompt(self) -> str:
        """The first user turn: conversations that share it share text."""
        return next((m["content"] for m in self.messages if m["role"] == "user"), "")

    def line(self) -> str:
        """As JSON, without the newline."""
        value: dict[str, Any] = {"messages": [dict(message) for message in self.messages]}
        if self.tokens is not None:
            value["tokens"] = list(self.tokens)
        value["finish_reason"] = "stop" if self.finished else "length"
        if self.temperature is not None:
            value["temperature"] = round(self.temperature, 4)
        if self.source:
            value["source"] = self.source
        return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True, eq=False)
class Example:
    """tokens [n] i32, supervised [n] bool: answers and their end-of-turn tokens. prompt: the first user
    turn, for a split that keeps answers to one prompt together. temperature: nan when unknown."""

    tokens: np.ndarray
    supervised: np.ndarray
    prompt: str
    temperature: float


# --- reading --------------------------------------------------------------------------------------------


def objects(path: Path) -> Iterator[Fields]:
    """The JSON object of each line that is not blank. ConfigError names the file and the line."""
    file_bytes(path)
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.isspace():
                continue
            where = f"{path}: line {number}"
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                said = f"is not valid JSON ({error})"
                if not line.endswith(b"\n"):
                    said = "is cut off: delete it, or continue with the command that was writing it"
                raise ConfigError(f"{where} {said}") from None
            if not isinstance(value, dict):
                raise ConfigError(f"{where} holds a JSON {type(value).__name__}, not an object")
            yield Fields(where, value)


def read(path: Path) -> list[Conversation]:
    """All conversations of a file. ConfigError names the file, the line and the field."""
    return [_conversation(line) for line in objects(path)]


def _conversation(line: Fields) -> Conversation:
    if "response" in line:
        messages: list[Message] = [
            {"role": "user", "content": line.text("prompt")},
            {"role": "assistant", "content": line.text("response")},
        ]
    else:
        messages = messages_of(line)
    if messages[-1]["role"] != "assistant" or not any(m["role"] == "user" for m in messages[:-1]):
        raise line.error("messages", "must hold a user's turn and end with an answer of the assistant")
    tokens = line.integers("tokens", None)
    if tokens is not None and not all(0 <= token <= MAX_INTEGER for token in tokens):
        raise line.error("tokens", "holds a number that is no token id")
    reason = line.text("finish_reason", None)
    if reason not in (None, "stop", "length"):
        raise line.error("finish_reason", f"is '{reason}': it must be stop or length")
    finished = line.flag("finished", True) if reason is None else reason == "stop"
    temperature, source = line.number("temperature", None), line.text("source", "")
    return Conversation(tuple(messages), tokens, finished, temperature, source, line.file)


def messages_of(line: Fields) -> list[Message]:
    """`messages` or `conversations` of a line, checked. Other keys of a message are dropped."""
    key = "conversations" if "messages" not in line and "conversations" in line else "messages"
    value = line.get(key)
    if not isinstance(value, list) or not value or not all(isinstance(m, dict) for m in value):
        raise line.error(key, "must be a list of objects with role and content")
    made: list[Message] = []
    for i, message in enumerate(value):
        fields = Fields(line.file, message, f"{key}[{i}]")
        made.append({"role": fields.text("role"), "content": fields.text("content")})
    if made[0]["role"] == "assistant":
        raise line.error(key, "begins with the assistant: its first turn must be the system's or the user's")
    return made


# --- from answers to text -------------------------------------------------------------------------------


def end_of_turn(tokenizer: Words) -> tuple[int, ...]:
    """What ends a turn. A vocabulary without stop ids (bytes) has what its template writes there."""
    return tokenizer.stop_ids or tuple(tokenizer.encode(around_user(tokenizer)[1])[:1])


def around_user(tokenizer: Words) -> tuple[str, str]:
    """The chat template's text before and after the user's own. ConfigError when it does not show that."""
    marker = "@@@"
    before, found, after = tokenizer.render([{"role": "user", "content": marker}], True).partition(marker)
    if not found:
        raise ConfigError("the chat template does not show the user's turn: it cannot be sampled")
    return before, after


def spell(tokenizer: Words, tokens: Sequence[int], finished: bool) -> str:
    """The text of an answer, without the token that ended it."""
    return tokenizer.decode(tokens[:-1] if finished else tokens)


# --- to tokens ------------------------------------------------------------------------------------------


def encode(
    conversation: Conversation,
    tokenizer: Words,
    turns: Literal["last", "all"] = "last",
    reasoning: bool = True,
) -> Example | None:
    """Tokens as decoding meets them, and which of them the draft learns to foresee.

    turns: the last answer only, or all. reasoning False: what stands between <think> and </think>, these
    included, is not supervised. None when fewer than two tokens are: no block fits. ConfigError when the
    tokens spell another text (another model's) or the template hides where an answer is.
    """
    with naming(conversation.where):
        last = len(conversation.messages) - 1
        known = conversation.tokens
        # Tokens that are known follow the prompt as decoding was given it; a text is part of the whole.
        messages = conversation.messages if known is None else conversation.messages[:last]
        text = tokenizer.render(messages, known is not None)
        ids, spans = tokenizer.encode_spans(text)
        answers = [
            _answer(conversation.messages, i, text, ids, spans, tokenizer)
            for i in range(len(messages))
            if messages[i]["role"] == "assistant" and (turns == "all" or i == last)
        ]
        if known is None:
            first, end = answers.pop()
            if not conversation.finished:  # the template ends it, the target did not
                end -= ids[end - 1] in tokenizer.stop_ids
            ids, answers = ids[:end], [*answers, (first, end)]
        else:
            spelt = spell(tokenizer, known, conversation.finished)
            if spelt.strip() != conversation.messages[last]["content"].strip():
                raise ConfigError(
                    "tokens do not spell the answer: they are of another tokenizer, leave them out"
                )
            answers.append((len(ids), len(ids) + len(known)))
            ids = [*ids, *known]
    supervised = np.zeros(len(ids), np.bool_)
    for first, end in answers:
        supervised[first:end] = True if reasoning else ~_reasoning(ids[first:end], tokenizer)
    if supervised.sum() < 2:
        return None
    temperature = float("nan") if conversation.temperature is None else conversation.temperature
    return Example(np.asarray(ids, np.int32), supervised, conversation.prompt, temperature)


def _answer(
    messages: Sequence[Message],
    index: int,
    text: str,
    ids: Sequence[int],
    spans: Sequence[tuple[int, int]],
    tokenizer: Words,
) -> tuple[int, int]:
    """[first, end) of message `index` in the ids of `text`, its end-of-turn token included: from where the
    template asks for an answer to the first stop token, or to where the turn ends in the text."""
    before, through = tokenizer.render(messages[:index], True), tokenizer.render(messages[: index + 1], False)
    limit = len(through) if text.startswith(through) else len(text)
    inside = [i for i, (start, end) in enumerate(spans) if start >= len(before) and end <= limit]
    stop = next((i for i in inside if ids[i] in tokenizer.stop_ids), None)
    if not text.startswith(before) or (stop is None and not text.startswith(through)):
        raise ConfigError(
            f"messages[{index}]: the chat template writes this answer differently from where it asks for it: "
            'set data.turns = "last", or let `regenerate` make answers with their tokens'
        )
    if not inside:
        return 0, 0
    return inside[0], (inside[-1] if stop is None else stop) + 1


def _reasoning(ids: Sequence[int], tokenizer: Words) -> np.ndarray:
    """[n] bool: which tokens of an answer hold a part of its reasoning."""
    pieces = [tokenizer.token_bytes(id, skip_special=False) for id in ids]
    ends = np.cumsum([len(piece) for piece in pieces])
    starts = np.concatenate([[0], ends[:-1]])
    inside = np.zeros(len(ids), np.bool_)
    for found in _REASONING.finditer(b"".join(pieces)):
        inside |= (starts < found.end()) & (ends > found.start())
    return inside
