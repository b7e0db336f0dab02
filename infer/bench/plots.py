"""The speed of every arm; of ours the curves: speed and tau by block size and tree budget, acceptance by position."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dflash_jax.weights.atomic import replacing
from infer.bench.arms import ADAPTIVE, AR, FIXED
from infer.bench.figures import ALL

ARMS = "arms.png"
NAMES = ("tokens_per_second.png", "ratio.png", "tau.png", "acceptance.png")


def draw(folder: Path, results: Mapping[str, Any]) -> list[Path]:
    """Writes ARMS into the folder, and NAMES where an arm of ours speculates; [] with nothing to compare."""
    datasets = results["datasets"]
    kinds = {of["kind"] for dataset in datasets.values() for of in dataset["arms"].values()}
    if kinds == {AR}:
        return []
    _write(folder / ARMS, _arms(datasets))
    if not kinds & {*FIXED, *ADAPTIVE}:
        return [folder / ARMS]
    for name in NAMES[:-1]:
        _write(folder / name, _sweep(datasets, name.removesuffix(".png")))
    _write(folder / NAMES[-1], _acceptance(datasets))
    return [folder / name for name in (ARMS, *NAMES)]


_LABELS = {
    "tokens_per_second": "tokens per second (median)",
    "ratio": "speed, autoregressive = 1 (median of pairs)",
    "tau": "tau (tokens per round)",
}


def _value(of: Mapping[str, Any], what: str) -> float | None:
    return of[what] if what == "tau" else of[what]["median"]


def _arms(datasets: Mapping[str, Any]) -> Figure:
    """Every arm's speed with its interval, a mark for each dataset and a larger one for all together."""
    arms = list(next(iter(datasets.values()))["arms"])
    figure = Figure(figsize=(7, 1.2 + 0.45 * len(arms)), layout="constrained")
    axes = figure.subplots()
    for number, (name, dataset) in enumerate(datasets.items()):
        whole = name == ALL or len(datasets) == 1
        shift = 0.0 if whole else 0.1 * (1 + number % 4)
        for row, of in enumerate(dataset["arms"].values()):
            ratio = of["ratio"]
            if ratio["median"] is not None:
                color = "black" if whole else f"C{number}"
                if ratio["low"] is not None:
                    axes.plot([ratio["low"], ratio["high"]], [row + shift] * 2, color=color, linewidth=1)
                axes.plot(
                    ratio["median"], row + shift, "D" if whole else "o", color=color,
                    markersize=7 if whole else 4, label=name if row == 0 else None,
                )  # fmt: skip
    axes.axvline(1, color="gray", linestyle=":", linewidth=1)
    axes.set_yticks(range(len(arms)), arms)
    axes.invert_yaxis()
    axes.set(xlabel=_LABELS["ratio"])
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3, axis="x")
    axes.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _sweep(datasets: Mapping[str, Any], what: str) -> Figure:
    """Left: chains by block size; right: trees by budget, a line per dataset and block size. Horizontal lines:
    autoregressive decoding, and adaptive arms, which have no size of their own."""
    grown = any(of["budget"] for dataset in datasets.values() for of in dataset["arms"].values())
    figure = Figure(figsize=(11 if grown else 6, 4.2), layout="constrained")
    panels = figure.subplots(1, 2 if grown else 1, sharey=True, squeeze=False)[0]
    for number, (name, dataset) in enumerate(datasets.items()):
        color = "black" if name == ALL else f"C{number}"
        arms = dataset["arms"].values()
        _line(
            panels[0],
            [(of["block_size"], of) for of in arms if of["kind"] == "chain"],
            what,
            name,
            color,
            "o-",
        )
        trees = [of for of in arms if of["kind"] == "tree"]
        sizes = sorted({of["block_size"] for of in trees})
        for size, style in zip(sizes, itertools.cycle(("o-", "s--", "^:", "v-.")), strict=False):
            points = [(of["budget"], of) for of in trees if of["block_size"] == size]
            _line(panels[-1], points, what, f"{name}, block {size}", color, style)
        _level(panels[0], arms, "adaptive", what, f"{name}, adaptive", color, "--")
        _level(panels[-1], arms, "adaptive-tree", what, f"{name}, adaptive", color, "--")
        if what == "tokens_per_second":
            _level(panels[0], arms, "ar", what, f"{name}, ar", color, ":")
    panels[0].set(xlabel="block size of the chain (anchor included)", ylabel=_LABELS[what])
    if grown:
        panels[-1].set(xlabel="tree budget (anchor excluded)")
    for axes in panels:
        if what != "tokens_per_second":
            axes.axhline(1, color="gray", linestyle=":", linewidth=1, label="ar")
        axes.grid(alpha=0.3)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(frameon=False, fontsize="small")
    return figure


def _level(
    axes: Axes, arms: Iterable[Mapping[str, Any]], kind: str, what: str, label: str, color: str, style: str
) -> None:
    for of in arms:
        level = _value(of, what)
        if of["kind"] == kind and level is not None:
            axes.axhline(level, color=color, linestyle=style, label=label, linewidth=1)


def _line(axes: Axes, points: list, what: str, label: str, color: str, style: str) -> None:
    known = sorted((x, y) for x, of in points if (y := _value(of, what)) is not None)
    if known:
        axes.plot(*zip(*known, strict=True), style, color=color, label=label)


def _acceptance(datasets: Mapping[str, Any]) -> Figure:
    """Of all datasets together: how often candidate 1, 2, ... was kept."""
    figure = Figure(figsize=(6, 4.2), layout="constrained")
    axes = figure.subplots()
    whole = datasets.get(ALL) or next(iter(datasets.values()))
    for arm, of in whole["arms"].items():
        shares = of["acceptance_by_position"]
        if shares:
            axes.plot(range(1, len(shares) + 1), shares, "o-", label=arm)
    axes.set(xlabel="candidate (depth in a tree)", ylabel="share of rounds that kept it", ylim=(0, 1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize="small")
    return figure


def _write(path: Path, figure: Figure) -> None:
    image = io.BytesIO()
    figure.savefig(image, dpi=120, format="png")
    with replacing(path) as file:
        file.write(image.getvalue())
