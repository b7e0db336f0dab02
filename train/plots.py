"""The curves of a run, drawn from its metrics file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from train import records

NAMES = ("loss.png", "tau.png", "accuracy.png")


def draw(folder: Path) -> list[Path]:
    """Writes loss.png, tau.png and accuracy.png into folder/plots from folder/metrics.jsonl; their paths,
    or [] where nothing was logged."""
    lines = records.read(folder / records.FILE)
    training = [line for line in lines if line["kind"] == records.TRAIN]
    held_out = [line for line in lines if line["kind"] == records.EVALUATION]
    if not lines:
        return []
    (folder / "plots").mkdir(exist_ok=True)
    made = []
    for name, plot in zip(NAMES, (_loss, _tau, _accuracy), strict=True):
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        plot(axes, training, held_out)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        made.append(folder / "plots" / name)
        figure.savefig(made[-1], dpi=120)
    return made


def _curve(axes: Axes, lines: list[dict[str, Any]], field: str, label: str, style: str) -> None:
    points = [(line["step"], line[field]) for line in lines if field in line]
    axes.plot([x for x, _ in points], [y for _, y in points], style, label=label)


def _loss(axes: Axes, training: list[dict[str, Any]], held_out: list[dict[str, Any]]) -> None:
    _curve(axes, training, "loss", "training", "-")
    _curve(axes, held_out, "loss", "held out", "o-")
    axes.set(xlabel="step", ylabel="loss (nats)")


def _tau(axes: Axes, training: list[dict[str, Any]], held_out: list[dict[str, Any]]) -> None:
    _curve(axes, training, "tau_uniform", "training, uniform anchors", "-")
    _curve(axes, held_out, "tau_uniform", "held out, uniform anchors", "o-")
    _curve(axes, held_out, "walk", "held out, walk (as decoding goes)", "s-")
    axes.set(xlabel="step", ylabel="tau (tokens per round)")


def _accuracy(axes: Axes, training: list[dict[str, Any]], held_out: list[dict[str, Any]]) -> None:
    """By slot: the last training interval, and the first, best and last evaluation."""
    chosen = {f"training, step {line['step']}": line for line in training[-1:]}
    if held_out:
        best = max(held_out, key=lambda line: line.get("walk") or 0.0)  # null: not a number
        for line in (held_out[0], best, held_out[-1]):
            chosen[f"held out, step {line['step']}"] = line
    for label, line in chosen.items():
        accuracy = line["accuracy"]
        axes.plot(range(1, len(accuracy) + 1), accuracy, "o-", label=label)
    axes.set(xlabel="slot of the block", ylabel="accuracy", ylim=(0, 1))
