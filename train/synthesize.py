"""Conversations that the target makes alone: no dataset, and nobody else's words.

A user turn is sampled from the target's own prior after the chat header, bare or begun by one of
`prompts.BEGINNINGS`; then the target answers it. The draft must learn the target's text as decoding
will meet it, so a share of the answers is greedy and the others are drawn at low temperatures.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np

from dflash_jax.buckets import bucket
from dflash_jax.config import ConfigError
from dflash_jax.journal import Journal
from dflash_jax.sampling import Sampling
from dflash_jax.state import Models
from dflash_jax.terminal import Screen
from train import features, origin
from train.answer import answer
from train.build import load_target
from train.conversations import Conversation, Words, around_user, end_of_turn, read, spell
from train.progress import Progress
from train.prompts import BEGINNINGS
from train.settings import Settings, Synthesize

# A nucleus of this mass holds the best token alone: greedy and sampled rows share one program.
_GREEDY = 1e-6
# Batches of user turns without a new one, after which the target is taken not to make any.
_PATIENCE = 20
_AMOUNTS = ("out", "conversations", "seconds", "rows")  # what may change while a file grows


def run(settings: Settings, screen: Screen) -> int:
    """Continue the file of conversations until it has as many as asked for, or the time is over. ConfigError when
    another target, or another recipe, made what is there."""
    recipe = settings.synthesize
    journal = Journal(settings.within(recipe.out))
    target = load_target(settings)
    made_with = {name: value for name, value in dataclasses.asdict(recipe).items() if name not in _AMOUNTS}
    origin.keep(journal.path, {"target": features.target_digest(target), **made_with})
    known = read(journal.path) if journal.path.stat().st_size else []
    missing = recipe.conversations - len(known)
    made = tokens = 0
    if missing > 0:
        models = Models(target.params, target=target.module)
        began = time.monotonic()
        progress = Progress("synthesizing", missing, "conversations")
        for batch in conversations(models, target.tokenizer, recipe, known):
            batch = batch[: missing - made]
            journal.append(conversation.line() for conversation in batch)
            made += len(batch)
            tokens += sum(len(conversation.tokens or ()) for conversation in batch)
            seconds = time.monotonic() - began
            over = made == missing or (recipe.seconds is not None and seconds >= recipe.seconds)
            if over or progress.due():
                progress.show(made, f"{tokens / seconds:,.0f} answer tokens/s")
            if over:
                break
    screen.clear()
    print(
        f"{len(known) + made:,} conversations in {journal.path}, {made:,} of them new ({tokens:,} answer tokens)"
    )
    print("next: python -m train fit, with the same flags")
    return 0


def conversations(
    models: Models, tokenizer: Words, recipe: Synthesize, known: Sequence[Conversation] = ()
) -> Iterator[list[Conversation]]:
    """Batches of `recipe.rows` conversations, without end and without a prompt that is in `known` or came
    before. A batch is a function of the recipe's seed and of how many conversations precede it, so what
    follows on a restart is new. ConfigError when the target makes no new user turns."""
    stop_ids = end_of_turn(tokenizer)
    before, after = (len(tokenizer.encode(part)) for part in around_user(tokenizer))
    capacity = _capacity(models, recipe, before + after)
    greedy = round(recipe.greedy * recipe.rows)
    wanted = max(greedy, recipe.rows - greedy)  # a prompt is answered in both ways where both have room
    seen = {conversation.prompt for conversation in known}
    done = len(known)
    waiting: list[tuple[str, list[int]]] = []
    while True:
        generator = np.random.default_rng((recipe.seed, done))
        patience = _PATIENCE
        while len(waiting) < wanted:
            new = []
            for text in user_turns(models, tokenizer, recipe, stop_ids, capacity, generator):
                prompt = tokenizer.chat([{"role": "user", "content": text}])
                if text not in seen and len(prompt) <= before + after + recipe.prompt_tokens:
                    seen.add(text)
                    new.append((text, prompt))
            waiting += new
            patience = _PATIENCE if new else patience - 1
            if not patience:
                raise ConfigError(
                    f"the target made no new user turn in {_PATIENCE * recipe.rows} tries: raise "
                    "synthesize.prompt_tokens, or bring prompts of your own (python -m train regenerate)"
                )
        chosen, waiting = waiting[:wanted], waiting[wanted:]
        asked = [*chosen[:greedy], *chosen[: recipe.rows - greedy]]
        low, high = recipe.temperatures
        drawn = generator.uniform(low, high, recipe.rows - greedy)
        temperatures = np.concatenate([np.zeros(greedy), drawn])
        generation = answer(
            models,
            [prompt for _, prompt in asked],
            rows=recipe.rows,
            budget=recipe.answer_tokens,
            how=_per_row(
                np.where(temperatures > 0, temperatures, 1.0),
                np.where(temperatures > 0, recipe.answer_top_p, _GREEDY),
            ),
            seeds=_seeds(generator, recipe.rows),
            stop_ids=stop_ids,
            capacity=capacity,
        )
        rows = zip(asked, generation.tokens, generation.finish_reasons, temperatures, strict=True)
        yield [
            _conversation(tokenizer, text, tokens, reason == "stop", float(temperature))
            for (text, _), tokens, reason, temperature in rows
        ]
        done += recipe.rows


def user_turns(
    models: Models,
    tokenizer: Words,
    recipe: Synthesize,
    stop_ids: Sequence[int],
    capacity: int,
    generator: np.random.Generator,
) -> list[str]:
    """Finished user turns from one batch. As text: a prompt that is typed is tokenized as a whole, which
    need not give the tokens that were sampled."""
    header = tokenizer.encode(around_user(tokenizer)[0])
    kinds = list(BEGINNINGS.values())
    begun: list[list[int]] = []
    for _ in range(recipe.rows):
        kind = kinds[generator.integers(len(kinds))]
        bare = generator.random() < recipe.bare
        start = tokenizer.encode(kind[generator.integers(len(kind))].rstrip(" "))
        begun.append([] if bare or len(start) >= recipe.prompt_tokens else start)
    generation = answer(
        models,
        [[*header, *start] for start in begun],
        rows=recipe.rows,
        budget=[recipe.prompt_tokens - len(start) for start in begun],
        how=_per_row(
            np.full(recipe.rows, recipe.prompt_temperature), np.full(recipe.rows, recipe.prompt_top_p)
        ),
        seeds=_seeds(generator, recipe.rows),
        stop_ids=stop_ids,
        capacity=capacity,
    )
    turns = [
        spell(tokenizer, [*start, *tokens], finished=True).strip()
        for start, tokens, reason in zip(begun, generation.tokens, generation.finish_reasons, strict=True)
        if reason == "stop"
    ]
    return [turn for turn in turns if turn]


def _conversation(
    tokenizer: Words, text: str, tokens: list[int], finished: bool, temperature: float
) -> Conversation:
    messages = (
        {"role": "user", "content": text},
        {"role": "assistant", "content": spell(tokenizer, tokens, finished)},
    )
    return Conversation(messages, tuple(tokens), finished, temperature, "synthesize")


def _capacity(models: Models, recipe: Synthesize, frame: int) -> int:
    """Positions for the template's frame, a user turn and an answer: one shape for all batches."""
    needed, most = frame + recipe.prompt_tokens + recipe.answer_tokens, models.target.config.max_positions
    if 0 < most < needed:
        raise ConfigError(
            f"synthesize.prompt_tokens and answer_tokens need {needed} positions with the chat template, "
            f"but the target has {most}: lower them"
        )
    return bucket(needed)


def _seeds(generator: np.random.Generator, count: int) -> list[int]:
    return generator.integers(0, 2**31 - 1, count).tolist()


def _per_row(temperature: np.ndarray, top_p: np.ndarray) -> Sampling:
    """Every row its own temperature and nucleus, in one compiled program."""
    shape = (-1, 1, 1)
    return Sampling(
        temperature=jnp.asarray(temperature, jnp.float32).reshape(shape),
        top_p=jnp.asarray(top_p, jnp.float32).reshape(shape),
        greedy=False,
        nucleus=True,
    )
