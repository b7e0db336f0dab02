"""The speed of a model without its weights: random ones of the published shapes, and acceptance that is forced.

Nothing in a round's time depends on what its tokens are: shapes are static, and a commit writes as many rows whether
they are kept or not. So random weights tell the time of a round, and the speed-up at a given tau is
tau * t_ar / t_round. Two forced patterns show that this holds: with a head of zeros all logits tie, the draft and the
target take the first index, and every candidate is accepted; with a random head hardly any is. Both rounds are
timed, in the compiled loop.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from dflash_jax import drafts, pair, plain_json, targets
from dflash_jax.buckets import bucket
from dflash_jax.config import ConfigError
from dflash_jax.drafts import DFlash
from dflash_jax.policy import Fixed
from dflash_jax.state import Models, Options
from dflash_jax.tables import nearest
from dflash_jax.terminal import Screen
from dflash_jax.weights.atomic import replacing
from dflash_jax.weights.tensors import flatten
from infer.bench.stages import ceiling
from infer.machine import describe_device, hardware, revision, versions
from infer.options import Synthetic
from infer.published import SHAPES
from infer.timing import any_prompt, by_length, stages

_log = logging.getLogger(__name__)

TAUS = tuple(range(2, 11))
RESULTS, TABLE = "synthetic.json", "synthetic.md"
COLUMNS = ("model", "context", "block", "ar", "draft", "verify", "commit", "all kept", "none kept",
           *(f"x at tau {tau}" for tau in (2, 4, 6, 8)))  # fmt: skip
# Rounds of the longer loop of a slope. One that keeps nothing but its own token is done block times as often.
_ROUNDS = {"all": 16, "none": 4}


def run(flags: Synthetic, screen: Screen) -> int:
    """Time every (model, context, block size), print the table, write it after each."""
    flags = _preset(flags)
    _check(flags)
    device = pair.pick_device(flags.device)
    dtype = flags.dtype or ("float32" if device.platform == "cpu" else "bfloat16")
    if flags.out is not None:
        _new_folder(flags.out)
    begin, results = time.perf_counter(), _about(flags, device, dtype)
    with jax.default_device(device):
        results["ceiling"] = ceiling(device, pair.DTYPES[dtype])
        for name in flags.models:
            if _used_up(flags, begin):
                _log.warning("the %g minutes are used up: %s is not timed", flags.minutes, name)
                continue
            models = random_models(name, max(flags.block_sizes), flags.draft_layers, dtype, device)
            for row in cells(models, name, flags, begin):
                results["rows"].append(row)
                _save(flags.out, results)
            del models  # before the next is made: two may be more than the device holds
    if not results["rows"]:
        raise ConfigError(f"nothing was timed in --minutes {flags.minutes:g}: give more")
    results["seconds"] = time.perf_counter() - begin
    _save(flags.out, results)
    screen.clear()
    show(results, Console(file=sys.stdout))
    return 0


def _new_folder(folder: Path) -> None:
    """Before the work, not after it. Results of another run are not replaced: they may have cost an hour of a GPU."""
    if (folder / RESULTS).exists():
        raise ConfigError(
            f"{folder / RESULTS}: is of another run: give another folder with --out, or remove it"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: --out cannot be written ({error.strerror})") from None


def _used_up(flags: Synthetic, begin: float, more: float = 0.0) -> bool:
    return time.perf_counter() + more - begin > 60 * flags.minutes


def _preset(flags: Synthetic) -> Synthetic:
    if flags.preset is None:
        return flags
    if jax.default_backend() == "cpu":
        _log.warning(
            "preset gpu needs a GPU and there is none here: the shapes of smollm2-135m on the CPU instead, at sizes "
            "that take a minute or two, to show what it measures"
        )
        return dataclasses.replace(flags, models=("smollm2-135m",), block_sizes=(4,), contexts=(128,), repeats=3,
                                   draft_layers=2, minutes=6.0)  # fmt: skip
    return dataclasses.replace(flags, models=("qwen3-8b", "qwen3.5-9b", "qwen3-30b-a3b"), block_sizes=(8, 16),
                               contexts=(1024, 8192), minutes=6.0)  # fmt: skip


def _check(flags: Synthetic) -> None:
    if not flags.models:
        raise ConfigError(f"name a model: {', '.join(SHAPES)}; or --preset gpu")
    for name in flags.models:
        if name not in SHAPES:
            raise ConfigError(f"no shape has the name '{name}'{nearest(name, SHAPES)}: {', '.join(SHAPES)}")
    for flag, values in (
        ("models", flags.models),
        ("--block-sizes", flags.block_sizes),
        ("--contexts", flags.contexts),
    ):
        if len(set(values)) < len(values):
            raise ConfigError(f"{flag}: one of the values is named twice, and each is timed once")
    if min((*flags.block_sizes, 2)) < 2 or not flags.block_sizes or not flags.contexts:
        raise ConfigError("--block-sizes needs blocks of at least 2, --contexts at least one length")
    if min(*flags.contexts, flags.repeats, flags.draft_layers) < 1 or flags.minutes <= 0:
        raise ConfigError("--contexts, --repeats, --draft-layers and --minutes must be positive")
    for name in flags.models:
        most = SHAPES[name].max_positions
        if 0 < most < max(flags.contexts) + 20 * max(flags.block_sizes):
            raise ConfigError(
                f"--contexts: {max(flags.contexts)} and a few blocks exceed the {most} of {name}"
            )


def _about(flags: Synthetic, device: jax.Device, dtype: str) -> dict[str, Any]:
    return {
        "method": (__doc__ or "").strip(),
        "dtype": dtype,
        "hardware": hardware(device),
        "device": describe_device(device),
        "versions": versions(),
        "revision": revision(),
        "settings": {"repeats": flags.repeats, "draft_layers": flags.draft_layers, "minutes": flags.minutes},
        "rows": [],
    }


def random_models(name: str, block_size: int, draft_layers: int, dtype: str, device: jax.Device) -> Models:
    """Random weights on the device, made there one after the other."""
    target = SHAPES[name]
    draft = pair.draft_shape(
        target, num_layers=draft_layers, block_size=block_size, mask_token_id=target.vocab_size - 1
    )
    abstract = {"target": targets.abstract_params(target), "draft": drafts.abstract_params(draft)}
    sizes = [math.prod(leaf.shape) for tree in abstract.values() for leaf in flatten(tree).values()]
    needed = sum(sizes) * pair.DTYPES[dtype].itemsize
    pair.say_memory(f"random weights of {name} and a draft of {draft_layers} layers", needed, device)
    free = _free(device)
    if free is not None and needed > free:
        raise ConfigError(
            f"{name} needs {needed / 2**30:.0f} GiB, {describe_device(device)} has {free / 2**30:.0f} free"
        )
    with jax.default_device(device):
        target_params, draft_params = (_random(tree, pair.DTYPES[dtype]) for tree in abstract.values())
    return Models(target_params, draft_params, targets.make_target(target), DFlash(draft))


def _free(device: jax.Device) -> int | None:
    """Bytes of memory that may be taken; None where nobody says."""
    known = device.memory_stats() or {}
    if "bytes_limit" in known:
        return known["bytes_limit"] - known.get("bytes_in_use", 0)
    if device.platform == "cpu" and "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _random(abstract: Mapping[str, Any], dtype: np.dtype) -> dict[str, Any]:
    """Matrices that keep the variance, vectors of ones: finite at any depth."""
    keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(abstract))))

    def draw(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        key = next(keys)
        if len(leaf.shape) == 1:
            return jnp.ones(leaf.shape, dtype)
        return jax.random.normal(key, leaf.shape, dtype) * leaf.shape[-1] ** -0.5

    return jax.tree.map(draw, dict(abstract))


def agreeing(models: Models) -> Models:
    """A head of zeros: all logits tie, so that every candidate is accepted."""
    config, params = models.target.config, dict(models.target_params)
    table = params["embed_tokens"]["weight"]
    if config.tie_word_embeddings:
        params["embed_tokens"] = {"weight": jnp.zeros_like(table)}
    else:
        params["lm_head"] = {"weight": jnp.zeros_like(params["lm_head"]["weight"])}
    return dataclasses.replace(models, target_params=params)


def cells(models: Models, name: str, flags: Synthetic, begin: float) -> Iterator[dict[str, Any]]:
    """A row for each context and block size, until the time is used up."""
    alike, last = agreeing(models), 0.0
    for context in flags.contexts:
        slots = bucket(context + 20 * max(flags.block_sizes))
        for size in sorted(flags.block_sizes):
            started = time.perf_counter()
            if _used_up(flags, begin, last):
                _log.warning(
                    "the %g minutes are used up: what is left of %s is not timed", flags.minutes, name
                )
                return
            _log.warning("%s: %d positions, blocks of %d", name, context, size)
            ar = by_length(models, 1, context, slots, flags.repeats, _ROUNDS["all"])
            rounds = {
                kept: by_length(of, size, context, slots, flags.repeats, _ROUNDS[kept])
                for kept, of in (("all", alike), ("none", models))
            }
            alone = stages(models, any_prompt(models, context), Options(Fixed(size)), flags.repeats)
            yield {
                "model": name, "context": context, "block_size": size, "ar_ms": ar,
                "round_ms": rounds["all"], "round_ms_none_kept": rounds["none"],
                "stages": alone,
                "speedup": {str(tau): tau * ar / rounds["all"] for tau in TAUS if tau <= size},
            }  # fmt: skip
            last = time.perf_counter() - started


def rows(results: Mapping[str, Any]) -> Iterator[list[str]]:
    """A text for each of COLUMNS."""
    for row in results["rows"]:
        alone = row["stages"]
        times = (row["ar_ms"], alone["draft_ms"], alone["verify_ms"], alone["commit_ms"], row["round_ms"],
                 row["round_ms_none_kept"])  # fmt: skip
        speeds = (row["speedup"].get(str(tau)) for tau in (2, 4, 6, 8))
        yield [
            row["model"], str(row["context"]), str(row["block_size"]), *(f"{ms:.2f}" for ms in times),
            *("-" if speed is None else f"{speed:.2f}" for speed in speeds),
        ]  # fmt: skip


def title(results: Mapping[str, Any]) -> str:
    most, how = results["ceiling"], results["settings"]
    return (
        f"random weights in {results['dtype']} on {results['device']}, a draft of {how['draft_layers']} layers, "
        f"milliseconds (medians of {how['repeats']}); large products reach {most['bytes_per_second'] / 1e9:.0f} GB/s "
        f"and {most['flops_per_second'] / 1e12:.2f} TFLOP/s"
    )


def show(results: Mapping[str, Any], console: Console) -> None:
    if not console.is_terminal:
        console.width = max(console.width, 180)
    console.print(title(results), highlight=False, soft_wrap=True)
    table = Table()
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "model" else "right")
    for row in rows(results):
        table.add_row(*row)
    console.print(table)
    console.print(
        "ar: a step of autoregressive decoding; draft, verify, commit: alone; all kept, none kept: a whole round in "
        "the compiled loop; x: tau * ar / round.",
        highlight=False,
        soft_wrap=True,
    )


def _save(folder: Path | None, results: Mapping[str, Any]) -> None:
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        title(results),
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|---" + "|---:" * (len(COLUMNS) - 1) + "|",
    ]
    lines += ["| " + " | ".join(row) + " |" for row in rows(results)]
    texts = ((RESULTS, plain_json.text(results, indent=1) + "\n"), (TABLE, "\n".join(lines) + "\n"))
    for name, text in texts:
        with replacing(folder / name) as file:
            file.write(text.encode())
    image = io.BytesIO()
    _plot(results).savefig(image, dpi=120, format="png")
    with replacing(folder / "speedup.png") as file:
        file.write(image.getvalue())


def _plot(results: Mapping[str, Any]) -> Figure:
    """Speed-up over tau, a line for every row."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for row in results["rows"]:
        taus = [tau for tau in TAUS if tau <= row["block_size"]]
        speeds = [row["speedup"][str(tau)] for tau in taus]
        axes.plot(taus, speeds, "o-", label=f"{row['model']}, {row['context']}, block {row['block_size']}")
    axes.axhline(1, color="gray", linestyle=":")
    axes.set(xlabel="tau (tokens per round)", ylabel="speed, autoregressive = 1", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize="small")
    return figure
