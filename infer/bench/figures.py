"""From measurements to numbers.

Speeds are of decoding alone. A ratio of two arms is taken prompt by prompt (they ran one after the other
there), and its median over prompts is reported with a 95 % bootstrap interval. Prompts that end with the
prefill's token have no speed and no rounds: they count in `prompts` only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from dflash_jax.generation import Generation
from infer.bench.arms import ADAPTIVE, AR, FIXED, Arm
from infer.bench.measure import Record
from infer.peers import DFLASH

ALL = "all"  # of several datasets
_RESAMPLES, _FEW = 2000, 5

Clock = Literal["seconds", "cpu_seconds"]


class Answers:
    """Records by arm and prompt. The repeats of one answer are one observation: the median of their speeds."""

    def __init__(self, records: Iterable[Record]):
        self._by_arm: dict[str, dict[tuple[str, int], list[Record]]] = defaultdict(dict)
        for record in records:
            self._by_arm[record.arm].setdefault((record.dataset, record.line), []).append(record)

    def first(self, arm: str) -> list[Record]:
        """The first repeat of every prompt."""
        return [repeats[0] for repeats in self._by_arm[arm].values()]

    def speeds(self, arm: str, clock: Clock = "seconds") -> dict[tuple[str, int], float]:
        """Tokens per second by prompt."""
        return {
            prompt: float(np.median([(len(r.tokens) - 1) / max(getattr(r, clock), 1e-9) for r in repeats]))
            for prompt, repeats in self._by_arm[arm].items()
            if repeats[0].committed
        }

    def ratios(self, arm: str, to: str, clock: Clock = "seconds") -> np.ndarray:
        """Speed of `arm` in speeds of `to`, on each prompt that both decoded."""
        ours, theirs = self.speeds(arm, clock), self.speeds(to, clock)
        return np.array([ours[prompt] / theirs[prompt] for prompt in ours if prompt in theirs])

    def pooled(self, arm: str) -> float | None:
        """Tokens per second of the whole: long answers count more."""
        speeds = self.speeds(arm)
        decoded = {(r.dataset, r.line): len(r.tokens) - 1 for r in self.first(arm)}
        seconds = sum(decoded[prompt] / speed for prompt, speed in speeds.items())
        return sum(decoded[prompt] for prompt in speeds) / seconds if seconds else None


def by_dataset(records: Sequence[Record]) -> dict[str, Answers]:
    """The datasets in their order, and all together when they are several."""
    names = list(dict.fromkeys(record.dataset for record in records))
    groups = {name: Answers(r for r in records if r.dataset == name) for name in names}
    return groups | ({ALL: Answers(records)} if len(names) > 1 else {})


def figures(answers: Answers, arm: Arm) -> dict[str, Any]:
    """What one arm did on one dataset. tau: tokens per round, over all rounds. acceptance_by_position: share of
    rounds that kept candidate 1, 2, ... among those that offered one (of a tree: one of that depth).
    histogram: rounds that accepted 0, 1, ... candidates. round_ms: median over prompts."""
    first, speeds = answers.first(arm.name), answers.speeds(arm.name)
    sizes = [size for record in first for size in record.sizes]
    committed = [kept for record in first for kept in record.committed]
    nodes = [n for record in first for n in record.nodes]
    whole = Generation([], [], [committed], sizes)
    round_ms = [
        1e3 * (len(record.tokens) - 1) / speeds[record.dataset, record.line] / len(record.committed)
        for record in first
        if record.committed
    ]
    return {
        "kind": arm.kind,
        "block_size": arm.block_size,
        "budget": arm.budget,
        "prompts": len(first),
        "tokens": sum(len(record.tokens) for record in first),
        "rounds": len(committed),
        "stopped": sum(record.finish_reason == "stop" for record in first),
        "tau": _or_none(np.mean, committed),
        "tokens_per_second": {**quartiles(list(speeds.values())), "pooled": answers.pooled(arm.name)},
        "ratio": median_of_ratios(answers.ratios(arm.name, AR)),
        "cpu_ratio": median_of_ratios(answers.ratios(arm.name, AR, "cpu_seconds")),
        "round_ms": _or_none(np.median, round_ms),
        "rows_per_round": _or_none(np.mean, nodes),
        "acceptance_by_position": whole.acceptance_by_position(),
        "histogram": whole.histogram() if committed else [],
    }


def prefill_seconds(answers: Answers) -> float:
    """Median over prompts. One prefill serves all arms, so it is no figure of any of them."""
    return float(np.median([record.prefill_seconds for record in answers.first(AR)]))


def comparisons(answers: Answers, arms: Sequence[Arm], of: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Trees with the chain of their block size, and chains with another implementation of it; autoregressive decoding
    with others of it; adaptive arms with the fastest arm that does not adapt (by
    median ratio to autoregressive decoding; of chains for chains). of: the figures of every arm."""
    pairs = []
    for arm in arms:
        if arm.kind == "tree":
            pairs += [(arm, to) for to in arms if to.kind == "chain" and to.block_size == arm.block_size]
        if arm.kind == "chain":
            pairs += [(arm, to) for to in arms if to.kind == DFLASH and to.block_size == arm.block_size]
        if arm.kind == AR:
            pairs += [(arm, to) for to in arms if to.is_peer and to.kind != DFLASH]
        if arm.kind in ADAPTIVE:
            fixed = [to for to in arms if to.kind in (AR, *FIXED) and (arm.budget or not to.budget)]
            pairs.append((arm, max(fixed, key=lambda to: of[to.name]["ratio"]["median"] or 0)))
    return [
        {
            "arm": arm.name,
            "to": to.name,
            "ratio": median_of_ratios(answers.ratios(arm.name, to.name)),
            "cpu_ratio": median_of_ratios(answers.ratios(arm.name, to.name, "cpu_seconds")),
            "tau_ratio": of[arm.name]["tau"] / of[to.name]["tau"] if of[arm.name]["tau"] else None,
        }
        for arm, to in pairs
    ]


def quartiles(values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return {"median": None, "q1": None, "q3": None}
    low, median, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return {"median": median, "q1": low, "q3": high}


def median_of_ratios(ratios: np.ndarray) -> dict[str, float | int | None]:
    """low, high: percentile bootstrap over prompts, the same resamples for the same number of prompts. None for fewer
    than 5 prompts, of which resamples show less than there is to know: of one, that it is certain."""
    if len(ratios) < _FEW:
        median = float(np.median(ratios)) if len(ratios) else None
        return {"median": median, "low": None, "high": None, "prompts": len(ratios)}
    picks = np.random.default_rng(0).integers(0, len(ratios), (_RESAMPLES, len(ratios)))
    low, high = np.quantile(np.median(ratios[picks], axis=1), (0.025, 0.975)).tolist()
    return {"median": float(np.median(ratios)), "low": low, "high": high, "prompts": len(ratios)}


def _or_none(reduce: Callable[[Any], Any], values: Sequence[float]) -> float | None:
    return float(reduce(values)) if len(values) else None
