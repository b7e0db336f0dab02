"""What hybrid targets cost, on random weights: `python -m infer.rollback --help`.

Three comparisons, each with its arms in turns, so that what else the machine does hits all of them alike. Of
every arm, compiled before: the median of the wall clock and of the processor time of this process, all its
threads: on one core of a CPU (taskset -c 0 ...) the second leaves out the turns that other processes took,
though not what they did to the core's caches; on a GPU only the first means anything.

layer    one gated delta layer of Qwen3.5-27B: what a verify takes and leaves behind, and what committing takes,
         by rollback strategy
rule     the gated delta rule alone: step by step, and in ancestor form with either trail. Rounds in one
         compiled loop, as in decoding: each starts from the state that the one before has committed
prefill  a prompt through a small hybrid model in both orders: time, and the most bytes that were alive in
         JAX arrays beyond those before (between programs: scratch within one is not in it)
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rich.console import Console
from rich.table import Table

from dflash_jax import command_line, decode, drafts, targets
from dflash_jax.block import Block, chain_block, tree_block
from dflash_jax.cache import KVCache, RecurrentState, States, Tape, cache_bytes, commit_layer
from dflash_jax.compile_cache import keep_compiled
from dflash_jax.config import FULL, RECURRENT, ConfigError, RecurrentConfig, RopeConfig, TargetConfig
from dflash_jax.gated_delta import delta_block, recur, states_of
from dflash_jax.pair import draft_shape
from dflash_jax.policy import Fixed
from dflash_jax.state import Models, Options
from dflash_jax.terminal import Screen
from dflash_jax.weights.atomic import check_writable, replacing
from dflash_jax.weights.tensors import flatten
from infer.machine import describe_device, versions

PROGRAM = "python -m infer.rollback"
Part = Literal["layer", "rule", "prefill"]
_MIB = 2**20
_log = logging.getLogger("infer.rollback")

# The layers of Qwen3.5-27B (tests/test_full_size.py has the whole model); a vocabulary is not part of one.
QWEN35_27B = TargetConfig(
    family="qwen3_5", hidden_size=5120, num_layers=4, num_heads=24, num_kv_heads=4, head_dim=256,
    intermediate_size=17408, vocab_size=2, rope=RopeConfig(1e7), rotary_dim=64,
    layer_types=(RECURRENT, RECURRENT, RECURRENT, FULL),
    recurrent=RecurrentConfig(key_heads=16, value_heads=48, key_dim=128, value_dim=128),
)  # fmt: skip
# As many layers as have both kinds twice, small enough for a prompt of thousands on a CPU.
SMALL = TargetConfig(
    family="qwen3_5", hidden_size=256, num_layers=8, num_heads=4, num_kv_heads=2, head_dim=64,
    intermediate_size=768, vocab_size=256, rope=RopeConfig(1e6), rotary_dim=16,
    layer_types=(RECURRENT, RECURRENT, RECURRENT, FULL) * 2,
    recurrent=RecurrentConfig(key_heads=4, value_heads=8, key_dim=64, value_dim=64),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Time the rollback strategies of hybrid targets, and both orders of prefill: a benchmark that writes an
    output file. Random weights; float32; some minutes on a CPU.

    python -m infer.rollback --out rollback.json

    python -m infer.rollback --parts rule --rule-rows 16 64 --repeats 9
    """

    parts: tuple[Part, ...] = ("layer", "rule", "prefill")
    """layer: one gated delta layer of Qwen3.5-27B (says how much memory first); rule: the gated delta rule alone;
    prefill: a long prompt through a small hybrid model."""

    chain: int = 16
    """Nodes of the layer's chain; its tree has twice as many, each node of the chain a second child."""

    accepted: int = 8
    """Nodes of it that are committed, the anchor included: what replay forwards again."""

    rule_rows: tuple[int, ...] = (16, 32, 64)
    """Rows of the rule's chains."""

    prompt_tokens: int = 2048
    """Length of the prompt."""

    chunk_sizes: tuple[int, ...] = (128, 512)
    """Positions of a chunk of it."""

    repeats: int = 5
    """Runs behind each median."""

    out: Path | None = None
    """Write all figures to this JSON file."""

    debug: bool = False
    """Show tracebacks and all log messages."""


Arm = Callable[[], Any]
Figures = dict[str, dict[str, float]]


def in_turns(arms: Mapping[str, Arm], repeats: int) -> Figures:
    """{arm: {"ms", "cpu_ms"}}, after one warm-up of each."""
    for run in arms.values():
        jax.block_until_ready(run())
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
    for _ in range(repeats):
        for name, run in arms.items():
            wall, cpu = time.perf_counter(), time.process_time()
            jax.block_until_ready(run())
            times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    medians = {name: 1e3 * np.median(spent, axis=0) for name, spent in times.items()}
    return {name: {"ms": float(wall), "cpu_ms": float(cpu)} for name, (wall, cpu) in medians.items()}


# --- one layer ------------------------------------------------------------------------------------------


def weights(abstract: Any) -> Any:
    """Random float32 parameters that keep the size of what they multiply."""
    rng = np.random.default_rng(0)

    def draw(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        return rng.standard_normal(leaf.shape, np.float32) / np.float32(leaf.shape[-1] ** 0.5)

    return jax.device_put(jax.tree.map(draw, abstract))


def recurrent_state(config: TargetConfig) -> RecurrentState:
    r = config.recurrent
    assert r is not None
    rng = np.random.default_rng(1)
    s = 0.1 * rng.standard_normal((1, r.value_heads, r.key_dim, r.value_dim), np.float32)
    return RecurrentState(jnp.asarray(s), jnp.zeros((1, r.conv_width - 1, r.channels)))


def chain_of(size: int) -> Block:
    return chain_block(jnp.zeros((1, size), jnp.int32))


def tree_of(size: int) -> Block:
    """A chain of half the nodes, and a second child for each of its nodes."""
    half = size // 2
    parents = [i - 1 if i < half else i - half for i in range(size)]
    return tree_block(jnp.zeros((1, size), jnp.int32), jnp.asarray([parents], jnp.int32))


def strategies(config: TargetConfig, params: Any, block: Block, accepted: int, repeats: int) -> Figures:
    """{strategy: forward and commit in milliseconds, MiB of its trail, difference}: of a verify of `block` whose
    first `accepted` nodes are committed. difference: of the committed state from the one by replay, at most."""
    module, state = targets.make_target(config), recurrent_state(config)
    length, count = jnp.zeros(1, jnp.int32), jnp.full(1, accepted, jnp.int32)
    path = jnp.arange(block.size, dtype=jnp.int32)[None]
    shape = (1, block.size, config.hidden_size)
    x = jnp.asarray(np.random.default_rng(2).standard_normal(shape, np.float32))

    def forward(trail: Literal["tape", "states"]) -> Tape | States:
        left = decode.layer_step(module, 0, params, x, block, state, length, 0, trail)[1]
        assert not isinstance(left, KVCache)
        return left

    def commit(left: Tape | States) -> RecurrentState:
        return decode.commit_layer_step(state, left, path, count, length)

    def replay() -> RecurrentState:
        after, one = state, jnp.ones(1, jnp.int32)
        for i in range(accepted):
            row = x[:, i : i + 1]
            _, left = decode.layer_step(module, 0, params, row, chain_of(1), after, length, 0, "tape")
            after = decode.commit_layer_step(after, left, path[:, :1], one, length)
        return after

    left = {"tape": forward("tape"), "states": forward("states")}
    times = in_turns(
        {
            "forward tape": lambda: forward("tape"),
            "forward states": lambda: forward("states"),
            "commit tape": lambda: commit(left["tape"]),
            "commit states": lambda: commit(left["states"]),
            "replay": replay,
        },
        repeats,
    )
    expected = replay().s

    def figures(verify: str, after: str, trail: Any, s: jax.Array) -> dict[str, float]:
        return {
            **{f"forward_{key}": value for key, value in times[verify].items()},
            **{f"commit_{key}": value for key, value in times[after].items()},
            "trail_mib": sum(leaf.nbytes for leaf in jax.tree.leaves(trail)) / _MIB,
            "difference": float(jnp.abs(s - expected).max()),
        }

    return {
        **{
            name: figures(f"forward {name}", f"commit {name}", left[name], commit(left[name]).s)
            for name in left
        },
        "replay": figures("forward tape", "replay", None, expected),
    }


# --- the rule -------------------------------------------------------------------------------------------

Rows = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]  # q, k, v, g, beta
_ROUNDS = 4  # of one timed loop


def rule(config: TargetConfig, size: int, repeats: int) -> Figures:
    """Milliseconds of one round of `size` rows, all of them committed: the sequential scan, the ancestor form
    with a tape, and with states."""
    r = config.recurrent
    assert r is not None
    rng = np.random.default_rng(3)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal((_ROUNDS, 1, size, *shape), np.float32))

    q, k = normal(r.key_heads, r.key_dim), normal(r.key_heads, r.key_dim)
    v, beta = normal(r.value_heads, r.value_dim), jax.nn.sigmoid(normal(r.value_heads))
    rows = (q, k, v, -0.1 * jnp.abs(normal(r.value_heads)), beta)
    start = recurrent_state(config).s
    block, count = chain_of(size), jnp.full(1, size, jnp.int32)
    path, inputs = jnp.arange(size, dtype=jnp.int32)[None], jnp.zeros((1, size, 1))
    before = jnp.zeros((1, r.conv_width - 1, 1))

    def sequential(s: jax.Array, rows: Rows) -> tuple[jax.Array, jax.Array]:
        o, s = recur(*rows, s)
        return s, o

    def ancestors(remember: str, s: jax.Array, rows: Rows) -> tuple[jax.Array, jax.Array]:
        o, parts = delta_block(*rows, s, block)
        left = Tape(*parts, inputs) if remember == "tape" else States(states_of(parts, s, block), inputs)
        after = commit_layer(RecurrentState(s, before), left, path, count, count)
        assert isinstance(after, RecurrentState)
        return after.s, o

    # one function object an arm, or each call would compile again
    steps: dict[str, Callable[..., Any]] = {
        "sequential": sequential,
        **{name: partial(ancestors, name) for name in ("tape", "states")},
    }
    arms = {name: partial(lax.scan, step, start, rows) for name, step in steps.items()}
    return {
        name: {key: value / _ROUNDS for key, value in times.items()}
        for name, times in in_turns(arms, repeats).items()
    }


# --- prefill --------------------------------------------------------------------------------------------


class Alive:
    """The most bytes of JAX arrays within a `with`, beyond those before it: read at every line of decode.py
    that runs, as between programs arrays come and go nowhere else."""

    def __enter__(self) -> Alive:
        self._before = self._peak = self._now()
        self._tracer = sys.gettrace()
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._tracer)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if frame.f_code.co_filename == decode.__file__ else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        self._peak = max(self._peak, self._now())
        return self._line

    @staticmethod
    def _now() -> int:
        return sum(array.nbytes for array in jax.live_arrays())

    @property
    def grown(self) -> int:
        return self._peak - self._before


def prefill(config: TargetConfig, prompt_tokens: int, chunk: int, repeats: int) -> Figures:
    """{order: milliseconds, MiB alive at most, and the MiB that it should be}: a prompt in chunks of `chunk`
    through a target of this shape and a draft with the reference's taps."""
    shape = draft_shape(config, num_layers=2, block_size=16, mask_token_id=0)
    models = Models(
        target_params=weights(targets.abstract_params(config)),
        draft_params=weights(drafts.abstract_params(shape)),
        target=targets.make_target(config),
        draft=drafts.DFlash(shape),
    )
    prompt = np.random.default_rng(4).integers(0, config.vocab_size, prompt_tokens).tolist()
    options = Options(Fixed(shape.block_size))

    def run(order: Literal["tokens", "layers"]) -> Any:
        return decode.prefill(models, [prompt], options, max_new_tokens=1, chunk_size=chunk, order=order)

    orders: tuple[Literal["tokens", "layers"], ...] = ("tokens", "layers")
    figures = in_turns({order: partial(run, order) for order in orders}, repeats)
    slots = run("tokens").target_cache.slots
    caches = cache_bytes(config, 1, slots, 4) + cache_bytes(shape, 1, slots, 4)
    for order in orders:
        with Alive() as alive:
            jax.block_until_ready(run(order))
        figures[order]["alive_mib"] = alive.grown / _MIB
        kept = residual_bytes(config, models.taps, prompt_tokens, chunk, order)
        figures[order]["expected_mib"] = (caches + kept) / _MIB
    return figures


def residual_bytes(config: TargetConfig, taps: tuple[int, ...], tokens: int, chunk: int, order: str) -> int:
    """What the order keeps between programs, float32: one chunk's features on their way to the draft; "layers" also
    the outputs of the tapped and of the last layer for the whole prompt."""
    streams = tokens * len({*taps, config.num_layers - 1}) if order == "layers" else 0
    return 4 * config.hidden_size * (streams + chunk * len(taps))


# --- the program ----------------------------------------------------------------------------------------


def measure(flags: Flags) -> dict[str, Figures]:
    """{what was compared: {arm: figures}}, in the order of `flags.parts`."""
    figures: dict[str, Figures] = {}
    if "layer" in flags.parts:
        abstract = targets.abstract_params(QWEN35_27B)["layers_0"]
        size = sum(4 * leaf.size for leaf in flatten(abstract).values())
        states = 2 * flags.chain * recurrent_state(QWEN35_27B).s.nbytes
        _log.warning("one layer: %.2f GiB of weights, %.2f GiB of states", size / 2**30, states / 2**30)
        params = weights(abstract)
        for what, block in (("chain", chain_of(flags.chain)), ("tree", tree_of(2 * flags.chain))):
            _log.info("timing a %s of %d nodes by strategy", what, block.size)
            figures[f"layer, {what} of {block.size}"] = strategies(
                QWEN35_27B, params, block, flags.accepted, flags.repeats
            )
        del params
    if "rule" in flags.parts:
        for size in flags.rule_rows:
            _log.info("timing the rule over %d rows", size)
            figures[f"rule, {size} rows"] = rule(QWEN35_27B, size, flags.repeats)
    if "prefill" in flags.parts:
        for chunk in flags.chunk_sizes:
            _log.info("timing prefill in chunks of %d", chunk)
            figures[f"prefill, chunks of {chunk}"] = prefill(SMALL, flags.prompt_tokens, chunk, flags.repeats)
    return figures


def tables(figures: dict[str, Figures]) -> list[Table]:
    shown = []
    for what, arms in figures.items():
        columns = list(next(iter(arms.values())))
        table = Table("", *(name.replace("_", " ") for name in columns), title=what)
        for arm, values in arms.items():
            table.add_row(arm, *(f"{values[name]:.3g}" for name in columns))
        shown.append(table)
    return shown


def run(arguments: list[str]) -> int:
    flags = command_line.flags(Flags, PROGRAM, arguments)
    numbers = (flags.chain, flags.accepted, flags.prompt_tokens, flags.repeats, *flags.rule_rows)
    if min(*numbers, *flags.chunk_sizes) < 1:
        raise ConfigError(f"every number of {PROGRAM} must be positive")
    if flags.accepted > flags.chain:
        raise ConfigError(f"--accepted {flags.accepted}: a chain of {flags.chain} has no more than its nodes")
    if flags.out:
        check_writable(flags.out)
    keep_compiled()
    with Screen(flags.debug) as screen:
        figures = measure(flags)
        screen.clear()
    device = describe_device(jax.devices()[0])
    title = f"float32 on {device}, medians of {flags.repeats}, {flags.accepted} nodes committed"
    console = Console()
    console.print(title, highlight=False)
    for table in tables(figures):
        console.print(table)
    if flags.out:
        with replacing(flags.out) as file:
            file.write(json.dumps({"title": title, "versions": versions(), **figures}, indent=1).encode())
    return 0


if __name__ == "__main__":
    sys.exit(command_line.guarded(run))
