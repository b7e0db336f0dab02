"""How long the parts take: autoregressive steps, rounds, and the stages of a round alone.

Method: every figure is the median over repeats of warm runs (compiled before), in milliseconds of wall
clock with `block_until_ready`; whole generations are divided by their rounds. Figures of one call are
comparable with each other, not with those of another machine or another hour.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from dflash_jax import decode
from dflash_jax.buckets import prefixes
from dflash_jax.pair import Pair
from dflash_jax.policy import Fixed
from dflash_jax.state import Models, Options, RoundState
from dflash_jax.terminal import Screen
from dflash_jax.tree import TreeShape
from dflash_jax.weights.atomic import replacing
from infer.machine import describe_device
from infer.options import Time
from infer.peers import Peers

_log = logging.getLogger(__name__)


def seconds(run: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """Median seconds of `run` after one warm-up, and its last result."""
    result = jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return float(np.median(times)), result


def interleaved(runs: Sequence[Callable[[], Any]], repeats: int) -> list[float]:
    """Seconds of each of several runs that are to be compared, on a machine whose speed drifts: they take turns, and
    each gets its median share of a turn, times the median turn. Each is warmed up once."""
    for run in runs:
        jax.block_until_ready(run())
    turns = np.zeros((repeats, len(runs)))
    for turn in turns:
        for i, run in enumerate(runs):
            start = time.perf_counter()
            jax.block_until_ready(run())
            turn[i] = time.perf_counter() - start
    whole = turns.sum(1, keepdims=True)
    return (np.median(turns / whole, axis=0) * np.median(whole)).tolist()


def any_prompt(models: Models, length: int) -> list[int]:
    """Arbitrary tokens: no time depends on which."""
    rows = min(1000, models.target.config.vocab_size)
    return np.random.default_rng(0).integers(0, rows, length).tolist()


def generation(
    models: Models,
    prompt: Sequence[int],
    size: int,
    new_tokens: int,
    repeats: int,
    capacity: int | None = None,
) -> dict[str, float]:
    """Prefill and the compiled loop, without stop tokens: what `new_tokens` cost. size 1 is autoregressive."""
    models = models if size > 1 else models.without_draft()
    options = Options(Fixed(size))

    def start() -> RoundState:
        return decode.prefill(models, [prompt], options, max_new_tokens=new_tokens, capacity=capacity)

    prefill, state = seconds(start, repeats)
    loop, end = seconds(lambda: decode.generate(models, state, options), repeats)
    rounds = int(end.rounds)
    return {
        "prefill_ms": 1e3 * prefill,
        "round_ms": 1e3 * loop / rounds,
        "rounds": rounds,
        "tau": (int(end.emitted[0]) - 1) / rounds,
        "tokens_per_second": (int(end.emitted[0]) - 1) / loop,
        "tokens_per_second_with_prefill": int(end.emitted[0]) / (loop + prefill),
    }


def parts(models: Models, prompt: Sequence[int], options: Options) -> dict[str, Callable[[], Any]]:
    """The stages of one round, each to run alone, from the state after the prompt. Of a tree also what choosing its
    candidates costs, a part of its draft: top_k (the best tokens of each depth) and tree (top_k included: the
    prefixes, their parents and ancestors)."""
    size = options.largest
    state = decode.prefill(models, [prompt], options, max_new_tokens=64)
    slots = next(n for n in prefixes(state.target_cache.slots) if n >= len(prompt))
    drafted = decode.propose_step(models, state, options, size, slots)
    block = drafted.candidates.block
    output = decode.verify_step(models, state, block, slots, options)
    verified = decode.judge_step(state, drafted, output, options)
    found: dict[str, Callable[[], Any]] = {
        "draft": partial(decode.propose_step, models, state, options, size, slots),
        "verify": partial(decode.verify_step, models, state, block, slots, options),
        "accept": partial(decode.judge_step, state, drafted, output, options),
        "commit": partial(decode.write_step, models, state, verified, options),
        "round": partial(decode.round_step, models, state, options),
    }
    if options.tree is not None:
        shape, vocab = options.tree, models.choices
        logits = jax.random.normal(jax.random.key(0), (1, size - 1, vocab), jnp.float32)
        found["top_k"] = partial(decode.top_k_step, logits, k=min(shape.budget, vocab))
        found["tree"] = partial(decode.tree_step, state.anchor, logits, shape=shape)
    return found


def stages(models: Models, prompt: Sequence[int], options: Options, repeats: int) -> dict[str, float]:
    """Milliseconds of `parts`, which take turns."""
    found = parts(models, prompt, options)
    times = interleaved(list(found.values()), repeats)
    return {f"{name}_ms": 1e3 * time for name, time in zip(found, times, strict=True)}


def peer(
    peers: Peers, name: str, prompt: Sequence[int], size: int, new_tokens: int, repeats: int
) -> dict[str, float]:
    """As `generation`, of another implementation."""
    answers = [peers.answer(name, prompt, new_tokens, (), size) for _ in range(repeats + 1)][1:]
    prefill, loop = (
        float(np.median([getattr(answer, what)[0] for answer in answers])) for what in ("prefill", "decoding")
    )
    rounds = len(answers[0].committed)
    return {
        "prefill_ms": 1e3 * prefill,
        "round_ms": 1e3 * loop / rounds,
        "rounds": rounds,
        "tau": float(np.mean(answers[0].committed)),
        "tokens_per_second": (new_tokens - 1) / loop,
        "tokens_per_second_with_prefill": new_tokens / (loop + prefill),
    }


def by_length(
    models: Models, size: int, committed: int, capacity: int, repeats: int, rounds: int = 16
) -> float:
    """Milliseconds per round with about `committed` positions in caches of `capacity`: the slope between a
    short and a long loop, so that entering the loop (which copies the state) is not in it. (Where noise makes the
    short one the slower, the long loop's mean.)"""
    models = models if size > 1 else models.without_draft()
    options = Options(Fixed(size))
    prompt = any_prompt(models, committed)
    budget = rounds * size + 1
    state = decode.prefill(models, [prompt], options, max_new_tokens=budget, capacity=capacity)
    short = dataclasses.replace(state, limit=jnp.asarray([2 * size + 1], jnp.int32))
    few, early = seconds(lambda: decode.generate(models, short, options), repeats)
    many, late = seconds(lambda: decode.generate(models, state, options), repeats)
    if many <= few:
        return 1e3 * many / int(late.rounds)
    return 1e3 * (many - few) / (int(late.rounds) - int(early.rounds))


def run(pair: Pair, flags: Time, screen: Screen) -> int:
    """Print the tables, write `flags.out`."""
    models = pair.models
    assert pair.draft is not None
    prompt = any_prompt(models, flags.prompt_tokens)
    console, figures = Console(file=sys.stdout), {}
    title = (
        f"target {pair.target.source}, draft {pair.draft.source}, {pair.dtype} on {describe_device(pair.device)}, "
        f"{flags.prompt_tokens} prompt tokens, {flags.new_tokens} new tokens, medians of {flags.repeats}"
    )
    sizes = (1, *flags.block_sizes)
    for size in sizes:
        _log.info("timing block size %d", size)
        figures[f"block {size}"] = generation(models, prompt, size, flags.new_tokens, flags.repeats)
    for size in flags.block_sizes:
        figures[f"stages of block {size}"] = stages(models, prompt, Options(Fixed(size)), flags.repeats)
        for budget in flags.tree_budgets:
            _log.info("timing trees of %d candidates at block size %d", budget, size)
            options = Options(Fixed(size, budget + 1), tree=TreeShape(budget))
            of = stages(models, prompt, options, flags.repeats)
            of |= {f"{name}_share": of[f"{name}_ms"] / of["round_ms"] for name in ("top_k", "tree")}
            figures[f"tree of {budget}, block {size}"] = of
    if flags.lengths:
        for size in (1, flags.block_sizes[0]):
            _log.info("timing long caches at block size %d", size)
            figures[f"block {size}, by committed/capacity"] = {
                f"{committed}/{capacity}_ms": by_length(models, size, committed, capacity, flags.repeats)
                for committed, capacity in ((100, 256), (100, 8192), (4000, 8192))
            }
    if flags.compare:
        others = Peers(pair, ("transformers", "dflash"))
        _log.info("timing transformers and dflash")
        figures["transformers"] = peer(others, "transformers", prompt, 1, flags.new_tokens, flags.repeats)
        for size in flags.block_sizes:
            figures[f"dflash block {size}"] = peer(
                others, "dflash", prompt, size, flags.new_tokens, flags.repeats
            )
    screen.clear()
    console.print(title, highlight=False, soft_wrap=True)
    for what, values in figures.items():
        shown = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
        console.print(f"{what}: {shown}", highlight=False, soft_wrap=True)
    if flags.out:
        with replacing(flags.out) as file:
            file.write(json.dumps({"title": title, **figures}, indent=1).encode())
    return 0
