"""How long a training step takes and how much memory: `python -m train.timing --help`.

Each case runs in a process of its own, so that its peak memory is its own. Features are given, as from
the store: what is timed is the draft's forward, head, loss, backward and update.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dflash_jax import command_line
from dflash_jax.config import ConfigError, DraftConfig, RopeConfig, default_taps
from dflash_jax.weights.atomic import replacing

PROGRAM = "python -m train.timing"
OURS, SPECFORGE = "dflash_jax", "specforge"


@dataclass(frozen=True)
class Case:
    """The shapes of a step. Defaults: a 3-layer draft of SmolLM2-135M."""

    block_size: int = 8
    anchors: int = 64
    sequences: int = 2
    length: int = 448
    layers: int = 3
    candidates: int = 0
    chunk: int = 256
    hidden_size: int = 576
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    intermediate_size: int = 1536
    vocab_size: int = 49152
    target_layers: int = 30

    @property
    def draft(self) -> DraftConfig:
        return DraftConfig(
            hidden_size=self.hidden_size,
            num_layers=self.layers,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate_size,
            vocab_size=self.vocab_size,
            rope=RopeConfig(1e5),
            block_size=self.block_size,
            mask_token_id=3,
            taps=default_taps(self.target_layers, 5),
            num_target_layers=self.target_layers,
        )


@dataclass(frozen=True)
class Flags:
    """Time training steps, each case in a process of its own.

    python -m train.timing --cases 8,64,2,448 16,64,2,448 16,256,1,448 --compare
    """

    cases: tuple[str, ...] = ("8,64,2,448", "16,64,2,448", "16,256,1,448")
    """block size, anchors, sequences, length: one quadruple a case."""

    shapes: Case = Case()
    """Everything else."""

    repeats: int = 5
    """Steps behind each median, after one that compiles."""

    compare: bool = False
    """Also SpecForge's step (extra `parity`, and pip install --no-deps specforge==0.2.0), in turns."""

    out: Path | None = None
    """Write the figures to this JSON file."""


def ours(case: Case) -> Callable[[], None]:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from dflash_jax.config import TargetConfig
    from dflash_jax.drafts import DFlash, init_params
    from dflash_jax.targets import make_target
    from train import step

    target = TargetConfig(
        family="llama",
        hidden_size=case.hidden_size,
        num_layers=case.target_layers,
        num_heads=case.heads,
        num_kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        intermediate_size=case.intermediate_size,
        vocab_size=case.vocab_size,
        rope=RopeConfig(1e5),
        tie_word_embeddings=True,
    )
    random = np.random.default_rng(0)
    shape = (1, case.sequences, case.length)
    table = random.normal(0, 0.02, (case.vocab_size, case.hidden_size)).astype(np.float32)
    target_params = jax.device_put({"embed_tokens": {"weight": table}})
    tokens = random.integers(4, case.vocab_size, shape).astype(np.int32)
    every = np.ones(shape, bool)
    width = len(case.draft.taps) * case.hidden_size
    features = random.normal(size=(*shape, width)).astype(np.float32)
    batch = jax.device_put(step.Batch(tokens, every, every, features))
    frequency = jnp.asarray(random.random(case.vocab_size), jnp.float32)
    setup = step.Setup(
        make_target(target), DFlash(case.draft), anchors=case.anchors, gamma=4.0,
        candidates=case.candidates, chunk=case.chunk,
    )  # fmt: skip
    state = step.init_state(setup, init_params(case.draft, jax.random.key(0)))

    def update() -> None:
        nonlocal state
        state, _, norm = step.train_step(
            setup, target_params, state, batch, jax.random.key(0), jnp.float32(1e-4), frequency
        )
        jax.block_until_ready(norm)

    return update


def measure(who: str, case: Case, repeats: int) -> dict[str, float]:
    """Milliseconds per step (median, fastest), seconds of the first, GB at the peak, blocks' predicted
    tokens a second."""
    if who == OURS:
        update = ours(case)
    else:
        from train.peers import specforge_step

        update = specforge_step(case.draft, case.sequences, case.length, case.anchors)
    start = time.perf_counter()
    update()
    first = time.perf_counter() - start
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        update()
        times.append(time.perf_counter() - start)
    middle = statistics.median(times)
    predicted = case.sequences * case.anchors * (case.block_size - 1)
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "milliseconds": middle * 1e3,
        "fastest": min(times) * 1e3,
        "first_seconds": first,
        "peak_gb": kilobytes / 1e6,
        "tokens_per_second": predicted / middle,
    }


def in_process(who: str, case: Case, repeats: int) -> dict[str, float]:
    command = [sys.executable, "-m", "train.timing", "--one", json.dumps([who, asdict(case), repeats])]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"{who}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def run(arguments: list[str]) -> int:
    if arguments[:1] == ["--one"]:
        who, case, repeats = json.loads(arguments[1])
        print(json.dumps(measure(who, Case(**case), repeats)))
        return 0
    flags = command_line.flags(Flags, PROGRAM, arguments)
    rows = []
    console = Console(stderr=True)
    for text in flags.cases:
        try:
            block, anchors, sequences, length = map(int, text.split(","))
        except ValueError:
            raise ConfigError(f"--cases: '{text}' is not block,anchors,sequences,length") from None
        case = replace(flags.shapes, block_size=block, anchors=anchors, sequences=sequences, length=length)
        for who in (OURS, SPECFORGE) if flags.compare else (OURS,):
            with console.status(f"{who}: block {block}, {anchors} anchors, {sequences} x {length}"):
                rows.append({"who": who, **asdict(case), **in_process(who, case, flags.repeats)})
    table = Table(
        "step of", "block", "anchors", "sequences", "ms", "fastest", "tokens/s", "peak GB", "first s"
    )
    for row in rows:
        table.add_row(
            row["who"], str(row["block_size"]), str(row["anchors"]), f"{row['sequences']} x {row['length']}",
            f"{row['milliseconds']:.0f}", f"{row['fastest']:.0f}", f"{row['tokens_per_second']:.0f}",
            f"{row['peak_gb']:.2f}", f"{row['first_seconds']:.1f}",
        )  # fmt: skip
    Console().print(table)
    if flags.out:
        with replacing(flags.out) as file:
            file.write(json.dumps(rows, indent=1).encode())
    return 0


if __name__ == "__main__":
    sys.exit(command_line.guarded(run))
