"""Conversations that the target makes alone: no dataset, and nobody else's words.

A user turn is sampled from the target's own prior after the chat header, bare or begun by one of
`prompts.BEGINNINGS`; then the target answers it. The draft must learn the target's text as decoding
will meet it, so half of the answers are greedy and half drawn at temperature 0.2 to 0.7.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from dflash_jax import decode
from dflash_jax.config import ConfigError
from dflash_jax.generation import finish
from dflash_jax.sampling import Sampling
from dflash_jax.state import AUTOREGRESSIVE, Models
from dflash_jax.tokenizer import Tokenizer
from train.prompts import BEGINNINGS

# A nucleus of this mass holds the best token alone: greedy and sampled rows share one program.
_GREEDY = 1e-6


@dataclass(frozen=True)
class Recipe:
    """rows: batch size, halved between greedy and sampled answers. prompt_tokens, answer_tokens: budgets
    (longer prompts are dropped, longer answers cut). bare: share of user turns without a beginning.
    temperatures: range of the sampled answers. capacity: positions allocated for a conversation."""

    rows: int = 64
    prompt_tokens: int = 160
    answer_tokens: int = 256
    bare: float = 0.35
    prompt_temperature: float = 1.0
    prompt_top_p: float = 0.95
    temperatures: tuple[float, float] = (0.2, 0.7)
    answer_top_p: float = 0.9
    capacity: int = 512
    chunk_size: int = 256


def user_header(tokenizer: Tokenizer) -> list[int]:
    """The tokens of the chat template up to the user's own text. Raises ConfigError for a template that
    does not show that text."""
    marker = "@@@"
    before, found, _ = tokenizer.render([{"role": "user", "content": marker}], True).partition(marker)
    if not found:
        raise ConfigError("the chat template does not show the user's turn: it cannot be sampled")
    return tokenizer.encode(before)


def conversations(
    models: Models, tokenizer: Tokenizer, recipe: Recipe, seed: int
) -> Iterator[list[tuple[list[int], list[int], float]]]:
    """Batches of (prompt tokens with the template, answer tokens, temperature), without end and without
    a prompt that came before. One item per answered batch: time limits are checked between items."""
    generator = np.random.default_rng(seed)
    header = user_header(tokenizer)
    seen: set[str] = set()
    waiting: list[list[int]] = []
    half = max(1, recipe.rows // 2)
    while True:
        while len(waiting) < half:
            for text in user_turns(models, tokenizer, header, recipe, generator):
                prompt = tokenizer.chat([{"role": "user", "content": text}])
                if text not in seen and len(prompt) + recipe.answer_tokens <= recipe.capacity:
                    seen.add(text)
                    waiting.append(prompt)
        prompts, waiting = waiting[:half], waiting[half:]
        yield answers(models, tokenizer, prompts * 2, half, recipe, generator)


def user_turns(
    models: Models, tokenizer: Tokenizer, header: list[int], recipe: Recipe, generator: np.random.Generator
) -> list[str]:
    """Finished user turns from one batch. As text: a prompt that is typed is tokenized as a whole, which
    need not give the tokens that were sampled."""
    kinds = list(BEGINNINGS.values())
    begun = []
    for _ in range(recipe.rows):
        kind = kinds[generator.integers(len(kinds))]
        bare = generator.random() < recipe.bare
        begun.append([] if bare else tokenizer.encode(kind[generator.integers(len(kind))].rstrip(" ")))
    how = _per_row(np.full(recipe.rows, recipe.prompt_temperature), np.full(recipe.rows, recipe.prompt_top_p))
    prompts = [[*header, *start] for start in begun]
    tokens, reasons = _run(models, tokenizer, prompts, recipe.prompt_tokens, how, recipe, generator)
    turns = [
        tokenizer.decode([*start, *row]).strip()
        for start, row, reason in zip(begun, tokens, reasons, strict=True)
        if reason == "stop"
    ]
    return [turn for turn in turns if turn]


def answers(
    models: Models,
    tokenizer: Tokenizer,
    prompts: Sequence[list[int]],
    greedy: int,
    recipe: Recipe,
    generator: np.random.Generator,
) -> list[tuple[list[int], list[int], float]]:
    """Answers to these prompts: the first `greedy` at temperature 0, the others sampled."""
    sampled = len(prompts) - greedy
    drawn = generator.uniform(*recipe.temperatures, sampled)
    temperatures = np.concatenate([np.zeros(greedy), drawn])
    how = _per_row(
        np.where(temperatures > 0, temperatures, 1.0),
        np.where(temperatures > 0, recipe.answer_top_p, _GREEDY),
    )
    tokens, _ = _run(models, tokenizer, prompts, recipe.answer_tokens, how, recipe, generator)
    return [
        (prompt, row, float(temperature))
        for prompt, row, temperature in zip(prompts, tokens, temperatures, strict=True)
    ]


def _per_row(temperature: np.ndarray, top_p: np.ndarray) -> Sampling:
    """Every row its own temperature and nucleus, in one compiled program."""
    shape = (-1, 1, 1)
    return Sampling(
        temperature=jnp.asarray(temperature, jnp.float32).reshape(shape),
        top_p=jnp.asarray(top_p, jnp.float32).reshape(shape),
        greedy=False,
        nucleus=True,
    )


def _run(
    models: Models,
    tokenizer: Tokenizer,
    prompts: Sequence[list[int]],
    budget: int,
    how: Sampling,
    recipe: Recipe,
    generator: np.random.Generator,
) -> tuple[list[list[int]], list[str]]:
    models = models.without_draft()
    state = decode.prefill(
        models,
        prompts,
        AUTOREGRESSIVE,
        max_new_tokens=budget,
        how=how,
        seeds=generator.integers(0, 2**31 - 1, len(prompts)).tolist(),
        stop_ids=tokenizer.stop_ids,
        chunk_size=recipe.chunk_size,
        capacity=recipe.capacity,
    )
    generation = finish(decode.generate_autoregressive(models, state))
    return generation.tokens, generation.finish_reasons
