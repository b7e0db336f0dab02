"""The benchmark from prompts to files."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from dflash_jax.config import ConfigError
from dflash_jax.generation import DraftWarning
from dflash_jax.pair import Pair
from dflash_jax.policy import Adaptive
from dflash_jax.terminal import Screen
from infer.bench import plots, report, stages
from infer.bench.about import about
from infer.bench.arms import Arm
from infer.bench.differences import count, differences
from infer.bench.figures import ALL, by_dataset, comparisons, figures, prefill_seconds
from infer.bench.journal import FILE, Measured
from infer.bench.measure import Bench, Prompt, Prompts
from infer.machine import revision
from infer.session import Session
from infer.settings import Settings

METHOD = (
    "Every prompt is prefilled once and decoded by every arm from that state, alone in its batch, the arms one after "
    "the other in an order that rotates from prompt to prompt; programs are compiled and run once before, and "
    "compiling is in no figure. The prefill, with the draft's context where there is a draft, is no part of an arm's "
    "time. tokens/s: new tokens after the first, divided by the wall time of decoding; median "
    "and quartiles over prompts. x ar: median over prompts of the ratio to autoregressive decoding of the same "
    "prompt, with a 95 % bootstrap interval over prompts; the same in CPU time of the process, which other processes "
    "disturb less (it counts waiting threads, and says nothing of a GPU). tau: tokens per round over all rounds. rows: "
    "what the target verified per round. differ: answers whose tokens are not the autoregressive ones; a near-tie is "
    "rounding, suspicious a bug. Other implementations (transformers, dflash, llamacpp) run with the "
    "same weights in the same type, from their own prefill; theirs is timed from their first token on."
)


def prompts(session: Session, name: str, lines: Mapping[int, str], longest: int, raw: bool) -> Prompts:
    """One dataset in the target's tokens. ConfigError when none is short enough."""
    found = [Prompt(name, line, tuple(session.prompt(text, raw=raw))) for line, text in lines.items()]
    kept = [prompt for prompt in found if len(prompt.tokens) <= longest]
    if not kept:
        raise ConfigError(f"{name}: no prompt has at most {longest} tokens: raise --max-prompt-tokens")
    return Prompts(name, kept, len(found) - len(kept))


def run(
    pair: Pair,
    arms: Sequence[Arm],
    datasets: Sequence[Prompts],
    settings: Settings,
    repeats: int,
    out: Path | None,
    screen: Screen,
    with_stages: bool = False,
) -> int:
    """Measure what is not measured yet, print the table, write `out`. Exit status 1 when an answer differs from
    the autoregressive one by more than a near-tie. with_stages: time the parts of a round alone, too."""
    asked = [prompt for dataset in datasets for prompt in dataset.prompts]
    longest = max(len(prompt.tokens) for prompt in asked)
    context = pair.target.config.max_positions
    if 0 < context < longest + settings.max_new_tokens:
        raise ConfigError(
            f"{longest} prompt tokens and max_new_tokens {settings.max_new_tokens} exceed the context of "
            f"{pair.target.source}, {context}: lower --max-prompt-tokens"
        )
    bench = Bench(pair, arms, settings, longest + settings.max_new_tokens)
    if out is not None and (out / report.RESULTS).exists() and not (out / FILE).exists():
        raise ConfigError(
            f"{out}: holds a {report.RESULTS} of something else: give another folder with --out"
        )
    measured = Measured(out, about(bench, datasets, repeats))
    with warnings.catch_warnings(), jax.default_device(pair.device):
        warnings.simplefilter("ignore", DraftWarning)  # tau is in the table
        measure(bench, asked, repeats, measured, screen)
        results = collect(bench, datasets, measured)
        if with_stages:
            results |= stages.measure(bench, asked, results["datasets"])
    screen.clear()
    if out is not None:
        report.save(out, results)
        plots.draw(out, results)
    report.show(results, Console(file=sys.stdout))
    ours = {arm.name for arm in arms if not arm.is_peer}
    return int(any(of["suspicious"] and of["arm"] in ours for of in results["differences"]))


def measure(bench: Bench, asked: Sequence[Prompt], repeats: int, measured: Measured, screen: Screen) -> None:
    """Every prompt that is not in the journal, dataset after dataset."""
    left = [(turn, prompt) for turn, prompt in enumerate(asked) if prompt not in measured]
    if not left:
        return
    measured.compiled(bench.warm_up(left[0][1]))
    screen.clear()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("gone,"),
        TimeRemainingColumn(),
        TextColumn("to go"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        # What an earlier run measured is no part of the pace that the remaining time is told from.
        task = progress.add_task("measuring", total=len(left))
        for turn, prompt in left:
            progress.update(task, description=f"{prompt.dataset}, {len(bench.arms)} arms a prompt")
            measured.add(prompt, bench.measure(prompt, turn, repeats))
            progress.advance(task)


def collect(bench: Bench, datasets: Sequence[Prompts], measured: Measured) -> dict[str, Any]:
    """The content of results.json."""
    asked = [prompt for dataset in datasets for prompt in dataset.prompts]
    found = differences(bench, asked, measured.records)
    left_out = {dataset.name: dataset.left_out for dataset in datasets}
    left_out[ALL] = sum(left_out.values())
    tables = {}
    for name, answers in by_dataset(measured.records).items():
        here = [difference for difference in found if name in (ALL, difference["dataset"])]
        arms = {
            arm.name: figures(answers, arm)
            | {"differences": count([difference for difference in here if difference["arm"] == arm.name])}
            for arm in bench.arms
        }
        tables[name] = {
            "prompts": len(answers.first(bench.arms[0].name)),
            "left_out": left_out[name],
            "prefill_seconds": prefill_seconds(answers),
            "arms": arms,
            "comparisons": comparisons(answers, bench.arms, arms),
        }
    return {
        **measured.about,
        "revision": revision(),
        "method": METHOD,
        "costs": {  # what the adaptive arms decided by
            arm.name: {"draft_ms": arm.options.policy.draft_ms, "verify_ms": arm.options.policy.verify_ms}
            for arm in bench.arms
            if isinstance(arm.options.policy, Adaptive)
        },
        "compile_seconds": measured.compile_seconds,
        "datasets": tables,
        "differences": found,
    }
