"""Answers of the target to the prompts of a file.

Assistant text in that file is not kept: the draft must learn the target's words, not a dataset's. Several
user turns are answered one after the other. With a draft the answers come sooner and are the same.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path

from dflash_jax import pair
from dflash_jax.buckets import bucket
from dflash_jax.config import ConfigError
from dflash_jax.journal import Journal
from dflash_jax.sampling import sampling
from dflash_jax.state import Models
from dflash_jax.terminal import Screen
from dflash_jax.weights.fields import Fields, naming
from train import features, origin
from train.answer import answer
from train.conversations import Conversation, Message, Words, end_of_turn, messages_of, objects, read, spell
from train.progress import Progress
from train.settings import Regenerate, Settings

ROLES = ("system", "user", "assistant")
_DECIDES = (
    "answer_tokens",
    "temperature",
    "top_p",
    "top_k",
    "seed",
)  # an answer, beside the target and the prompt


@dataclass(frozen=True)
class Prompt:
    """What is asked: the system's text, if any, and the user's turns. where: file and line, for errors."""

    system: str | None
    turns: tuple[str, ...]
    where: str = field(default="", compare=False)

    def first(self, count: int) -> Prompt:
        return replace(self, turns=self.turns[:count])

    @property
    def opening(self) -> list[Message]:
        """The messages before the first answer."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, {"role": "user", "content": self.turns[0]}]


@dataclass(frozen=True, eq=False)
class Speaker:
    """The target, perhaps with a draft, and how it answers."""

    models: Models
    tokenizer: Words
    wanted: Regenerate

    def encode(self, messages: Sequence[Message], where: str) -> list[int]:
        with naming(where):
            return self.tokenizer.chat(messages)

    def fits(self, messages: Sequence[Message], where: str) -> bool:
        """Whether the target has positions for these messages and a whole answer."""
        most = self.models.target.config.max_positions  # 0: unknown
        return not most or len(self.encode(messages, where)) + self.wanted.answer_tokens <= most


@dataclass
class Count:
    """Of one run: conversations and tokens made, and how the rounds went."""

    made: int = 0
    tokens: int = 0
    committed: int = 0
    rounds: int = 0


def run(settings: Settings, screen: Screen) -> int:
    """Answer every prompt that the file of answers lacks, then put that file into the prompts' order. ConfigError
    when another target, or other sampling, gave the answers that are there."""
    wanted = settings.regenerate
    if wanted.prompts is None:
        raise ConfigError("regenerate.prompts is missing: name a JSONL file of prompts")
    path = settings.within(wanted.out)
    if path.resolve() == wanted.prompts.resolve():
        raise ConfigError(f"regenerate.out is the file of prompts, {path}: name another one")
    asked, repeated = read_prompts(wanted.prompts, wanted.max_samples)
    journal = Journal(path)
    loaded = pair.load(settings.target, wanted.draft or pair.NO_DRAFT, dtype=settings.run.target_dtype)
    made_with = {name: value for name, value in asdict(wanted).items() if name in _DECIDES}
    origin.keep(path, {"target": features.target_digest(loaded.target), **made_with})
    known = _by_prompt(_read(path))
    speaker = Speaker(loaded.models, loaded.target.tokenizer, wanted)
    missing = [prompt for prompt in asked if _find(prompt, known, speaker) is None]
    fitting = [prompt for prompt in missing if speaker.fits(prompt.opening, prompt.where)]
    count = Count()
    began = time.monotonic()
    progress = Progress("regenerating", len(fitting), "conversations")
    for batch in batches(fitting, speaker):
        journal.append(conversation.line() for conversation in answers(speaker, batch, count))
        if progress.due() or count.made == len(fitting):
            speed = f"{count.tokens / (time.monotonic() - began):,.0f} tokens/s"
            tau = f", tau {count.committed / max(count.rounds, 1):.2f}" if speaker.models.draft else ""
            progress.show(count.made, speed + tau)
    total = _arrange(journal, asked, speaker)
    screen.clear()
    print(f"{total:,} conversations in {path}, {count.made:,} of them new ({count.tokens:,} tokens)")
    if repeated or len(missing) > len(fitting):
        print(
            f"left out: {repeated:,} repeated prompts, {len(missing) - len(fitting):,} too long for the target"
        )
    files = "" if wanted.out in settings.data.files else f" and --data.files {wanted.out}"
    print(f"next: python -m train fit, with the same flags{files}")
    return 0


# --- prompts --------------------------------------------------------------------------------------------


def read_prompts(path: Path, limit: int | None = None) -> tuple[list[Prompt], int]:
    """The first `limit` different prompts of a file, and how many repetitions were skipped on the way.
    ConfigError names the file, the line and the field."""
    found: dict[Prompt, None] = {}
    repeated = 0
    for line in objects(path):
        if len(found) == limit:
            break
        prompt = _prompt(line)
        repeated += prompt in found
        found.setdefault(prompt)
    return list(found), repeated


def _prompt(line: Fields) -> Prompt:
    if "turns" in line:
        prompt = Prompt(None, line.texts("turns"), line.file)
    elif "prompt" in line:
        prompt = Prompt(None, (line.text("prompt"),), line.file)
    elif "messages" in line or "conversations" in line:
        prompt = _asked(messages_of(line), line.file)
    else:
        raise ConfigError(f"{line.file} has neither turns, prompt nor messages")
    if not prompt.turns or not all(turn.strip() for turn in prompt.turns):
        raise ConfigError(f"{line.file} has an empty user turn, or none")
    return prompt


def _asked(messages: Sequence[Message], where: str) -> Prompt:
    """What is left of a conversation without its answers."""
    for i, message in enumerate(messages):
        if message["role"] not in ROLES or (message["role"] == "system" and i):
            raise ConfigError(
                f"{where}: messages[{i}].role is '{message['role']}': after a system's text, if any, user and "
                "assistant only"
            )
    system = messages[0]["content"] if messages[0]["role"] == "system" else None
    return Prompt(system, tuple(m["content"] for m in messages if m["role"] == "user"), where)


# --- what is there already ------------------------------------------------------------------------------


def _read(path: Path) -> list[Conversation]:
    return read(path) if path.stat().st_size else []


def _by_prompt(conversations: Sequence[Conversation]) -> dict[Prompt, Conversation]:
    """The first conversation that answers each prompt."""
    return {_asked(c.messages, c.where): c for c in reversed(conversations)}


def _find(prompt: Prompt, known: Mapping[Prompt, Conversation], speaker: Speaker) -> Conversation | None:
    """The conversation that answers this prompt: all of its turns, or as many as an answer that was cut,
    or the target's positions, left room for."""
    for turns in range(len(prompt.turns), 0, -1):
        found = known.get(prompt.first(turns))
        if found is None:
            continue
        if turns == len(prompt.turns) or not found.finished:
            return found
        following = [*found.messages, {"role": "user", "content": prompt.turns[turns]}]
        if not speaker.fits(following, prompt.where):
            return found
    return None


def _arrange(journal: Journal, asked: Sequence[Prompt], speaker: Speaker) -> int:
    """Put the file's conversations into the order of their prompts, all others last. Returns how many."""
    conversations = _read(journal.path)
    known = _by_prompt(conversations)
    found = [answered for prompt in asked if (answered := _find(prompt, known, speaker))]
    placed = {id(conversation): conversation for conversation in [*found, *conversations]}
    journal.rewrite(conversation.line() for conversation in placed.values())
    return len(placed)


# --- answering ------------------------------------------------------------------------------------------


def batches(prompts: Sequence[Prompt], speaker: Speaker) -> Iterator[list[Prompt]]:
    """Batches of equally many turns and similar lengths, so that padding is small and few shapes are
    compiled; the longest first, which shows at the start whether memory is enough."""
    size = {prompt: len(speaker.encode(prompt.opening, prompt.where)) for prompt in prompts}
    order = sorted(prompts, key=lambda prompt: (-len(prompt.turns), -size[prompt]))
    for _, group in groupby(order, lambda prompt: len(prompt.turns)):
        members, rows = list(group), speaker.wanted.rows
        yield from (members[first : first + rows] for first in range(0, len(members), rows))


def answers(speaker: Speaker, prompts: Sequence[Prompt], count: Count) -> list[Conversation]:
    """Conversations of a batch, turn by turn, in its order. One ends early where an answer is cut by its
    budget, or where the next turn has no room."""
    wanted, tokenizer = speaker.wanted, speaker.tokenizer
    stop_ids = end_of_turn(tokenizer)
    how = sampling(wanted.temperature, wanted.top_p, wanted.top_k)
    made: dict[Prompt, Conversation] = {}
    asked = {prompt: prompt.opening for prompt in prompts}
    for turn in range(1, len(prompts[0].turns) + 1):
        ids = [speaker.encode(messages, prompt.where) for prompt, messages in asked.items()]
        generation = answer(
            speaker.models,
            ids,
            rows=min(wanted.rows, 1 << (len(ids) - 1).bit_length()),
            budget=wanted.answer_tokens,
            how=how,
            seeds=[seed(wanted.seed, prompt.first(turn)) for prompt in asked],
            stop_ids=stop_ids,
            capacity=bucket(max(map(len, ids)) + wanted.answer_tokens),
        )
        count.tokens += sum(map(len, generation.tokens))
        count.committed += sum(map(sum, generation.committed))
        count.rounds += sum(map(len, generation.committed))
        following: dict[Prompt, list[Message]] = {}
        for (prompt, messages), tokens, reason in zip(
            asked.items(), generation.tokens, generation.finish_reasons, strict=True
        ):
            finished = reason == "stop"
            said = {"role": "assistant", "content": spell(tokenizer, tokens, finished)}
            made[prompt] = Conversation(
                (*messages, said), tuple(tokens), finished, wanted.temperature, "regenerate"
            )
            if finished and turn < len(prompt.turns):
                longer = [*messages, said, {"role": "user", "content": prompt.turns[turn]}]
                if speaker.fits(longer, prompt.where):
                    following[prompt] = longer
        asked = following
        if not asked:
            break
    count.made += len(prompts)
    return [made[prompt] for prompt in prompts]


def seed(base: int, prompt: Prompt) -> int:
    """Of one answer, whatever batch it is in and whatever was answered before: 31 bits."""
    digest = hashlib.sha256(json.dumps([base, prompt.system, *prompt.turns]).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
