"""The checkpoints of a run: everything that continuing needs, and nothing that has to be guessed.

    checkpoints/STEP/params      the draft's master weights, a plain tree
                     training    optimizer moments and step count, by path
                     run         JSON: random key, position in the data, evaluation, and the contract

Written by orbax in the background under a temporary name, so a killed run leaves whole checkpoints only.
Orbax casts and reshapes without a word when what is stored differs from what is asked for; everything is
compared here before it is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from dflash_jax.config import ConfigError
from train.step import State

PARAMS, TRAINING, RUN = "params", "training", "run"
_FORMAT = 1


def _context() -> ocp.Context:
    """In which the part `run` is JSON: left to choose, orbax makes arrays of its numbers."""
    registry = ocp.handlers.local_registry()
    registry.add(ocp.handlers.JsonHandler, checkpointable_name=RUN)
    context = ocp.Context()
    context.checkpointables.registry = registry
    return context


@dataclass(frozen=True)
class Saved:
    """What a checkpoint says of its run. evaluation: of held-out conversations at this step, if there was
    one. data: the position of the input pipeline. key: data of the random key that steps are drawn from."""

    step: int
    contract: dict[str, Any]
    key: list[int]
    data: dict[str, Any]
    evaluation: dict[str, Any] | None

    @property
    def walk(self) -> float | None:
        walk = (self.evaluation or {}).get("walk", math.nan)
        return None if math.isnan(walk) else float(walk)


class Checkpoints:
    """Those of one folder, made when it does not exist. Keeps the last `keep` and the best by the walk. A
    context manager: leaving it waits for the checkpoint that is being written. writing: removes what a killed run
    left half-written; who only reads must not, as a run may be writing just then."""

    def __init__(self, folder: Path, keep: int, writing: bool = False):
        self.folder = folder.resolve()
        training = ocp.training
        policies = training.preservation_policies
        best = policies.BestN(
            get_metric_fn=lambda metrics: metrics["walk"], n=1, keep_checkpoints_without_metrics=False
        )
        self._orbax = training.Checkpointer(
            self.folder,
            context=_context(),
            preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(keep), best]),
            cleanup_tmp_directories=writing,
        )
        self._writing: Any = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: Any) -> None:
        self._orbax.close()

    @property
    def latest(self) -> int | None:
        return max((found.step for found in self._orbax.checkpoints), default=None)

    @property
    def best(self) -> int | None:
        """Of the largest walk, the later one of equals; where none was evaluated, the latest."""
        walks = [(found.metrics["walk"], found.step) for found in self._orbax.checkpoints if found.metrics]
        return max(walks)[1] if walks else self.latest

    def path(self, step: int) -> Path:
        return self.folder / str(step)

    def save(self, state: State, saved: Saved) -> None:
        """Starts writing and returns. The arrays may not be donated to anything before `finish`."""
        params, training = _plain(state)
        run = {"format": _FORMAT, **vars(saved)}
        self._writing = self._orbax.save_checkpointables_async(
            saved.step,
            {PARAMS: params, TRAINING: training, RUN: run},
            force=True,
            metrics=None if saved.walk is None else {"walk": saved.walk},
        )

    def finish(self) -> None:
        """Wait for what is being written; raises what went wrong with it."""
        if self._writing is not None:
            self._writing.result()

    def restore(self, step: int, like: State, contract: Mapping[str, Any]) -> tuple[State, Saved]:
        """The state of a step, placed as `like` (abstract arrays with shardings) says. ConfigError where the
        contract differs or the arrays are not those of `like`."""
        saved = about(self.path(step))
        check(saved, contract, self.path(step))
        params, training = _plain(like)
        found = _read(self.path(step), {PARAMS: params, TRAINING: training})
        leaves = [found[TRAINING][name] for name in training]
        rest = jax.tree.unflatten(jax.tree.structure((like.optimizer, like.step)), leaves)
        return State(found[PARAMS], *rest), saved


def about(path: Path) -> Saved:
    """What a checkpoint says of its run; ConfigError when it is none of ours."""
    try:
        with _context():
            run = ocp.load_checkpointables(path.resolve(), {RUN: None})[RUN]
    except (KeyError, FileNotFoundError, ValueError, ocp.errors.InvalidLayoutError) as error:
        raise ConfigError(f"{path}: not a checkpoint of `fit` ({str(error).splitlines()[0]})") from None
    if run.get("format") != _FORMAT:
        raise ConfigError(f"{path}: a checkpoint of another version of this program: train again")
    return Saved(**{name: run[name] for name in Saved.__dataclass_fields__})


def read_params(path: Path, abstract: Any) -> Any:
    """The draft's weights (NumPy, float32) of the checkpoint folder `path`. abstract: their shapes."""
    like = jax.tree.map(lambda x: np.empty(x.shape, np.float32), abstract)
    return _read(path.resolve(), {PARAMS: like})[PARAMS]


def check(saved: Saved, contract: Mapping[str, Any], path: Path) -> None:
    """ConfigError that names the first field in which the run that wrote a checkpoint differs."""
    wanted = json.loads(json.dumps(contract))
    for name in [*wanted, *(name for name in saved.contract if name not in wanted)]:
        old, new = saved.contract.get(name), wanted.get(name)
        if old != new:
            raise ConfigError(
                f"{path}: made with {name} {_short(old)}, but this run has {_short(new)}: restore the old value, or "
                "choose another run.folder (run.init_from begins with a draft's weights)"
            )


def _short(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:12]}..."


def _plain(state: State) -> tuple[Any, dict[str, Any]]:
    """Parameters, and the other leaves by their path: optax's tuples are no business of a file."""
    rest = jax.tree_util.tree_leaves_with_path((state.optimizer, state.step))
    return state.params, {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in rest}


def _read(path: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    for part, tree in wanted.items():
        found, asked = _kinds(ocp.metadata(path, part).metadata), _kinds(tree)
        for name in sorted(found.keys() | asked.keys()):
            if found.get(name) != asked.get(name):
                raise ConfigError(
                    f"{path}: {part}: {name} is {found.get(name, 'missing')}, but this run has "
                    f"{asked.get(name, 'no such array')}: the checkpoint is of another model"
                )
    return ocp.load_checkpointables(path, wanted)


def _kinds(tree: Any) -> dict[str, str]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): f"{np.dtype(x.dtype)} {list(x.shape)}"
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }
