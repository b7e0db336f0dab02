"""Is it lossless here? Every decoder on the same prompts, every difference explained.

The reference is autoregressive decoding of each prompt alone. Against it: the compiled loop and the
stepwise loop, alone and in batches, and autoregressive decoding in batches, greedy and sampled with
fixed seeds; with `every_mode` also each rollback strategy, verify mode and bonus mode, in chains and
trees, in batches. See infer/lossless.py for what counts as a near-tie.
"""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from dflash_jax import decode, plain_json, stepwise
from dflash_jax.config import RECURRENT, TargetConfig
from dflash_jax.generation import DraftWarning, Generation, finish
from dflash_jax.policy import Fixed
from dflash_jax.sampling import Sampling, sampling
from dflash_jax.state import AUTOREGRESSIVE, Models, Options, RoundState
from dflash_jax.tree import TreeShape
from dflash_jax.weights.atomic import replacing
from infer.lossless import Divergence, divergences

_WIDTH = 120  # columns of a table that goes to a file: names of modes are long

Decoder = Callable[[Models, RoundState, Options], RoundState]


@dataclass(frozen=True)
class Arm:
    """One decoder at one temperature and batch size, compared with the reference of that temperature."""

    decoder: str
    temperature: float
    batch: int
    tokens: int
    tau: float
    differences: list[Divergence]

    @property
    def suspicious(self) -> int:
        return sum(not difference.near_tie for difference in self.differences)


@dataclass(frozen=True)
class Mode:
    """A loop, and the options that it runs with. alone: also run row by row, not only in batches."""

    name: str
    loop: Decoder
    options: Options
    alone: bool = True


def _stepwise(models: Models, state: RoundState, options: Options, **how: Any) -> RoundState:
    for after, _ in stepwise.generate_stepwise(models, state, options, **how):
        state = after
    return state


def _autoregressive(models: Models, state: RoundState, _: Options) -> RoundState:
    return decode.generate_autoregressive(models.without_draft(), state)


def plain_modes(options: Options) -> list[Mode]:
    return [
        Mode("autoregressive", _autoregressive, AUTOREGRESSIVE),
        Mode("generate", decode.generate, options),
        Mode("stepwise", _stepwise, options),
    ]


def every_mode(options: Options, target: TargetConfig, tree_budget: int) -> list[Mode]:
    """plain_modes, and what else there is; "states" only where the target has recurrent layers. ConfigError for a
    tree budget that is no tree's."""
    rollbacks = ("tape", "states") if RECURRENT in target.layer_types else ("tape",)
    budget, size = TreeShape(tree_budget), Fixed(options.largest, tree_budget + 1)
    shapes = {"chain": options, "tree": dataclasses.replace(options, policy=size, tree=budget)}
    made = plain_modes(options)
    for (shape, of), rollback in product(shapes.items(), (*rollbacks, "replay")):
        now = dataclasses.replace(of, rollback=rollback)
        if rollback != "replay" and now != options:
            made.append(Mode(f"generate, {shape}, {rollback}", decode.generate, now, alone=False))
        verifies = ("batched", "sequential") if shape == "chain" else ("batched",)
        for verify, bonus in product(verifies, ("implicit", "explicit")):
            if (now, verify, bonus) != (options, "batched", "implicit"):
                name = f"stepwise, {shape}, {rollback}, {verify}, {bonus}"
                loop = partial(_stepwise, verify=verify, bonus=bonus)
                made.append(Mode(name, loop, now, alone=False))
    return made


class Checker:
    """Prompts of one capacity, so that each decoder is compiled once per batch size."""

    def __init__(
        self,
        models: Models,
        prompts: Sequence[Sequence[int]],
        modes: Sequence[Mode],
        stop_ids: Sequence[int],
        max_new_tokens: int,
    ):
        self.models, self.modes, self.stop_ids = models, modes, stop_ids
        self.prompts = [list(prompt) for prompt in prompts]
        self.budget = max_new_tokens
        self.capacity = max(map(len, self.prompts)) + max_new_tokens

    def run(self, mode: Mode, how: Sampling, batch: int, step: Callable[[], None]) -> Generation:
        """All prompts through one decoder. Row i of the whole uses seed i, in any batch."""
        models = self.models if mode.options.largest > 1 else self.models.without_draft()
        parts = []
        for first in range(0, len(self.prompts), batch):
            rows = self.prompts[first : first + batch]
            fill = batch - len(rows)  # the last batch keeps the compiled size; its filler is dropped
            state = decode.prefill(
                models, rows + rows[:1] * fill, mode.options, max_new_tokens=self.budget, how=how,
                seeds=[*range(first, first + len(rows)), *[0] * fill], stop_ids=self.stop_ids,
                capacity=self.capacity,
            )  # fmt: skip
            done = finish(mode.loop(models, state, mode.options))
            parts.append((done, len(rows)))
            step()
        return Generation(
            [row for done, n in parts for row in done.tokens[:n]],
            [reason for done, n in parts for reason in done.finish_reasons[:n]],
            [row for done, n in parts for row in done.committed[:n]],
            [],
        )

    def arms(self, temperatures: Sequence[float], batch: int, step: Callable[[], None]) -> Iterator[Arm]:
        reference, *others = self._runs(batch)
        for temperature in temperatures:
            how = sampling(temperature)
            alone = self.run(reference[0], how, 1, step)
            yield self._arm(reference[0].name, temperature, 1, alone, alone, how)
            for mode, size in others:
                yield self._arm(mode.name, temperature, size, self.run(mode, how, size, step), alone, how)

    def steps(self, temperatures: Sequence[float], batch: int) -> int:
        return len(temperatures) * sum(-(-len(self.prompts) // size) for _, size in self._runs(batch))

    def _runs(self, batch: int) -> list[tuple[Mode, int]]:
        """(mode, batch size) of every arm; the first, autoregressive and alone, is the reference."""
        return [
            (mode, size) for size in sorted({1, batch}) for mode in self.modes if mode.alone or size == batch
        ]

    def _arm(
        self, name: str, temperature: float, batch: int, got: Generation, alone: Generation, how: Sampling
    ) -> Arm:
        seeds = range(len(self.prompts))
        found = divergences(self.models, self.prompts, alone.tokens, got.tokens, how, seeds)
        return Arm(name, temperature, batch, sum(map(len, got.tokens)), got.tau, found)


def run(checker: Checker, temperatures: Sequence[float], batch: int, out: Path | None, title: str) -> int:
    """Print the table as it grows, write `out`. Exit status 1 when a difference is not a near-tie."""
    arms: list[Arm] = []
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with warnings.catch_warnings(), Progress(*columns, console=console, transient=True) as progress:
        warnings.simplefilter("ignore", DraftWarning)  # tau is in the table
        task = progress.add_task("checking", total=checker.steps(temperatures, batch))
        for arm in checker.arms(temperatures, batch, lambda: progress.advance(task)):
            arms.append(arm)
            progress.update(task, description=f"{arm.decoder} x{arm.batch} T={arm.temperature:g} done")
            if out:
                _save(out, title, arms)
    width = None if sys.stdout.isatty() else _WIDTH
    report(arms, title, len(checker.prompts), Console(file=sys.stdout, width=width))
    return int(any(arm.suspicious for arm in arms))


def report(arms: Sequence[Arm], title: str, prompts: int, console: Console) -> None:
    console.print(title, highlight=False, soft_wrap=True)
    table = Table("decoder", *(column for column in ("T", "batch", "tokens", "tau")))
    for column in ("differ", "near-ties", "suspicious", "largest gap"):
        table.add_column(column, justify="right")
    for arm in arms:
        gaps = [difference.gap for difference in arm.differences]
        table.add_row(
            arm.decoder, f"{arm.temperature:g}", str(arm.batch), str(arm.tokens),
            "-" if np.isnan(arm.tau) or arm.decoder == "autoregressive" else f"{arm.tau:.3f}",
            str(len(gaps)), str(len(gaps) - arm.suspicious), str(arm.suspicious),
            f"{max(gaps):.1e}" if gaps else "-",
        )  # fmt: skip
    console.print(table)
    total, suspicious = sum(len(arm.differences) for arm in arms), sum(arm.suspicious for arm in arms)
    console.print(
        f"{prompts} prompts: {total} rows differ from autoregressive decoding alone, {suspicious} suspicious",
        highlight=False,
    )


def _save(out: Path, title: str, arms: Sequence[Arm]) -> None:
    with replacing(out) as file:
        file.write(
            plain_json.text({"title": title, "arms": [asdict(arm) for arm in arms]}, indent=1).encode()
        )
