"""Both decoders side by side: what a newcomer sees first. It says so when speculation does not pay."""

from __future__ import annotations

import dataclasses
import sys
import textwrap
import warnings
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from dflash_jax import pair as pairs
from dflash_jax.generation import DraftWarning
from dflash_jax.sampling import sampling
from dflash_jax.terminal import Screen
from infer.lossless import Divergence, divergences
from infer.machine import describe_device
from infer.session import Completion, Session
from infer.settings import Settings

PROMPTS = (
    "Explain in two sentences why the sea looks blue from far away.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "List the planets of the solar system from the sun outwards, one per line.",
    "A train leaves at 9:40 and arrives at 11:15. How many minutes does it travel?",
    "Repeat the sentence 'The quick brown fox jumps over the lazy dog.' three times.",
)
BLOCK = 8  # of a draft that is made here
_WARM_UP = 8  # tokens: the same program as any budget up to 64


@dataclass(frozen=True)
class Both:
    """One prompt's answers. difference: None when the tokens are the same."""

    prompt: str
    plain: Completion
    fast: Completion
    difference: Divergence | None

    @property
    def speedup(self) -> float:
        return _per_token(self.plain) / _per_token(self.fast)

    def same(self) -> str:
        if self.difference is None:
            return "yes"
        what = "near-tie" if self.difference.near_tie else "BUG"
        return f"{what} at {self.difference.position}, {self.difference.gap:.2g} apart"


def _per_token(answer: Completion) -> float:
    return answer.seconds["decode"] / max(1, len(answer.tokens) - 1)


def run(session: Session, settings: Settings, screen: Screen) -> int:
    """Print the comparison. Exit status 1 when tokens differ by more than a near-tie."""
    if session.pair.draft is None:
        draft = pairs.random_draft(session.pair.target, block_size=settings.block_size or BLOCK)
        session = Session(session.pair.with_draft(draft), session.load_seconds)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DraftWarning)  # the verdict says it
        results, compiling = measure(session, settings)
    screen.clear()
    report(session, results, compiling, Console(file=sys.stdout))
    return int(any(both.difference and not both.difference.near_tie for both in results))


def measure(session: Session, settings: Settings) -> tuple[list[Both], float]:
    """All prompts through both decoders, and the seconds that compiling took. Each is warmed up first:
    the first run of a program also pages it and its weights in."""
    plain = Session(session.pair.with_draft(None))
    plain_settings = settings.without_draft()
    # One capacity for all, so that each decoder is compiled once.
    capacity = max(len(session.prompt(prompt)) for prompt in PROMPTS) + settings.max_new_tokens
    compiling = 0.0
    for one, how in ((plain, plain_settings), (session, settings)):
        short = dataclasses.replace(how, max_new_tokens=min(_WARM_UP, settings.max_new_tokens))
        compiling += one.complete(PROMPTS[0], short, capacity=capacity).seconds["compile"]
    results = []
    for prompt in PROMPTS:
        slow = plain.complete(prompt, plain_settings, capacity=capacity)
        fast = session.complete(prompt, settings, capacity=capacity)
        compiling += slow.seconds["compile"] + fast.seconds["compile"]
        results.append(_both(session, prompt, slow, fast))
    return results, compiling


def _both(session: Session, prompt: str, slow: Completion, fast: Completion) -> Both:
    tokens = [slow.prompt_tokens], [slow.tokens], [fast.tokens]
    found = divergences(session.pair.models, *tokens, sampling(), [0])
    return Both(prompt, slow, fast, found[0] if found else None)


def report(session: Session, results: list[Both], compiling: float, console: Console) -> None:
    pair = session.pair
    assert pair.draft is not None
    console.print(
        f"target {pair.target.source}, draft {pair.draft.source}, block {results[0].fast.block_size}, "
        f"{pair.dtype} on {describe_device(pair.device)}, greedy\n"
        f"loaded in {session.load_seconds:.1f} s, compiled in {compiling:.1f} s; plain and DFlash: tokens per "
        "second of decoding;\ntau: tokens per round; same: whether both decoders give the same tokens",
        highlight=False,
        soft_wrap=True,
    )
    table = Table("prompt")
    for name in ("tokens", "plain", "DFlash", "speedup", "tau", "same"):
        table.add_column(name, justify="right")
    for both in results:
        table.add_row(
            textwrap.shorten(both.prompt, 24, placeholder=" ..."),
            str(len(both.fast.tokens)),
            f"{1 / _per_token(both.plain):.1f}" if len(both.plain.tokens) > 1 else "-",
            f"{1 / _per_token(both.fast):.1f}" if len(both.fast.tokens) > 1 else "-",
            f"{both.speedup:.2f}x" if len(both.fast.tokens) > 1 else "-",
            f"{both.fast.stats.tau:.2f}" if both.fast.stats.sizes else "-",
            both.same(),
        )
    console.print(table)
    committed = [n for both in results for n in both.fast.stats.committed[0]]
    if committed:
        console.print("candidates accepted per round:")
        console.print("\n".join(histogram(committed, results[0].fast.block_size)), highlight=False)
        console.print(verdict(pair, results, float(np.mean(committed))), highlight=False, soft_wrap=True)


def histogram(committed: list[int], block_size: int, width: int = 40) -> list[str]:
    counts = np.bincount(np.asarray(committed) - 1, minlength=block_size)
    return [
        f"{accepted:4}  {'█' * round(width * count / len(committed)):{width}}  {count:4} rounds"
        for accepted, count in enumerate(counts)
    ]


def verdict(pair: pairs.Pair, results: list[Both], tau: float) -> str:
    assert pair.draft is not None
    slow, fast = (
        sum(answer.seconds["decode"] for answer in answers)
        for answers in ([both.plain for both in results], [both.fast for both in results])
    )
    ratio, same = slow / fast, sum(both.difference is None for both in results)
    lines = [f"{same} of {len(results)} answers have the same tokens in both decoders."]
    if not pair.draft.trained:
        lines.append(
            f"The draft is untrained: its candidates are chance, so a round yields {tau:.2f} tokens and DFlash "
            f"runs at {ratio:.2f} times the speed of one token at a time. That the tokens agree "
            "does not depend on the draft; that it is fast does."
        )
    elif ratio < 1:
        lines.append(
            f"DFlash is slower here, {ratio:.2f} times the autoregressive speed: {tau:.2f} tokens per round do not "
            f"pay for verifying {results[0].fast.block_size} rows and for the draft on this device."
        )
    else:
        lines.append(f"DFlash decodes {ratio:.2f} times as fast, at {tau:.2f} tokens per round.")
    return "\n".join(lines)
