"""`fit`: train a draft until its steps are done, through kills and resumes, and export the best of it.

The device is never waited for in a step: what steps measure stays there until a line of the log, an
evaluation or a checkpoint is due. A loss that is not finite is therefore noticed a few steps late, but always
before anything is saved: the last checkpoint is good.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import signal
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dflash_jax import drafts, pair, plain_json
from dflash_jax.config import ConfigError, DraftConfig
from dflash_jax.terminal import Screen
from dflash_jax.weights.atomic import replacing
from train import build, corpus, evaluate, export, features, lock, mesh, pipeline, plots, trained
from train import loss as losses
from train.checkpoints import Checkpoints, Saved, about, read_params
from train.corpus import Corpus
from train.loss import Metrics
from train.progress import Progress
from train.records import EVALUATION, TRAIN, Records
from train.settings import Optimizer, Settings
from train.step import Setup, State, at_step, init_state, train_step
from train.stop import Stop

_AHEAD = 2  # steps in flight: enough that the device never waits, few enough that batches do not pile up
NOT_FINITE = Path("not-finite.json")


class NotFinite(RuntimeError):
    """The loss or its gradient is not a number any more."""


@dataclass(frozen=True, eq=False)
class Job:
    """What a run is made of. target: its params are on one device, not yet on the mesh. report: of
    corpus.load. store: of the target's states, of the training and of the held-out conversations."""

    settings: Settings
    setup: Setup
    target: pair.Target
    training: Corpus
    held_out: Corpus
    report: dict[str, Any]
    stores: tuple[features.Store | None, features.Store | None] = (None, None)

    @property
    def config(self) -> DraftConfig:
        return self.setup.draft.config


@dataclass(frozen=True)
class Outcome:
    """evaluation: of the best checkpoint, with its `step`. stopped: the signal that ended the run early."""

    step: int
    total: int
    evaluation: dict[str, Any]
    stopped: int | None


def run(settings: Settings, screen: Screen) -> int:
    """Exit status: 0, or 128 + the signal that stopped the run after it was saved."""
    logging.getLogger("absl").setLevel(logging.ERROR)  # orbax tells what it does
    mesh.connect(settings.mesh)
    devices = mesh.make(settings.mesh)
    outcome = fit(prepare(settings), devices)
    screen.clear()
    if jax.process_index() == 0:
        for line in _closing(settings, outcome):
            print(line)
    return 0 if outcome.stopped is None else 128 + outcome.stopped


def prepare(settings: Settings) -> Job:
    """Loads the target and the conversations."""
    target = build.load_target(settings)
    setup = build.make_setup(settings, target, build.draft_config(settings, target))
    training, held, report = corpus.load(settings, target.tokenizer)
    held = evaluate.sample(held, settings.run.evaluate_conversations)
    if settings.features.source == "online":
        return Job(settings, setup, target, training, held, report)
    folder = settings.within(settings.features.store)
    stores = tuple(features.open_store(folder, target, setup, part) for part in (training, held))
    return Job(settings, setup, target, training, held, report, (stores[0], stores[1]))


def fit(job: Job, devices: Mesh) -> Outcome:
    """Trains, or continues the run of this folder; when all steps are done, exports the best draft and draws
    the curves. Raises ConfigError where the folder's run has another contract, is beyond these steps or is running
    elsewhere, NotFinite when a loss is."""
    folder, primary = job.settings.folder, jax.process_index() == 0
    folder.mkdir(parents=True, exist_ok=True)
    with lock.alone(folder) if primary else nullcontext():
        return _fit(job, devices, primary)


def _fit(job: Job, devices: Mesh, primary: bool) -> Outcome:
    settings = job.settings
    with Checkpoints(settings.folder / "checkpoints", settings.run.keep, writing=True) as checkpoints:
        trainer = Trainer(job, devices, checkpoints)
        with Stop() as stop, Records(settings, trainer.step, primary) as log:
            trainer.train(log, stop)
        checkpoints.finish()
        assert checkpoints.best is not None
        best = checkpoints.path(checkpoints.best)
    evaluation = {"step": int(best.name), **(about(best).evaluation or {})}
    done = trainer.step == trainer.total
    params = read_params(best, drafts.abstract_params(job.config))  # all processes together, as orbax reads
    if done and primary:
        export.write_draft(
            settings.folder / trained.DRAFT, job.config, params, settings, evaluation, job.report, job.target
        )
        plots.draw(settings.folder)
    return Outcome(trainer.step, trainer.total, evaluation, None if done else stop.signal)


class Trainer:
    """The state of a run, and the loop over its steps."""

    def __init__(self, job: Job, devices: Mesh, checkpoints: Checkpoints):
        settings = job.settings
        self._job, self._devices, self._checkpoints = job, devices, checkpoints
        multiple = mesh.shards(devices)
        self._data = pipeline.batches(
            job.training,
            settings.data,
            accumulate=settings.run.accumulate,
            seed=settings.run.seed,
            multiple=multiple,
            store=job.stores[0],
        )
        epoch = pipeline.steps_per_epoch(job.training, settings.data, settings.run.accumulate, multiple)
        self.total = settings.run.steps or math.ceil(settings.run.epochs * epoch)
        self._contract = contract(job)
        rows, self._width = evaluate.batch_shape(job.held_out, settings)
        self._rows = -(-rows // multiple) * multiple
        self._frequency = None
        if job.setup.candidates:
            seen = np.bincount(job.training.tokens[job.training.supervised], minlength=job.config.vocab_size)
            self._frequency = mesh.place(devices, seen.astype(np.float32))
        self.step, self._key, self._state = self._begin()
        self._target = mesh.place(devices, job.target.params)

    def _begin(self) -> tuple[int, jax.Array, State]:
        """From the last checkpoint, or from the start."""
        run, latest = self._job.settings.run, self._checkpoints.latest
        if latest is None:
            text = _ordinary_text(self._job.training)
            params = build.start_params(self._job.settings, self._job.target, self._job.config, text)
            # on the CPU: no device need ever hold a whole state
            with jax.default_device(jax.local_devices(backend="cpu")[0]):
                state = jax.tree.map(np.asarray, init_state(self._job.setup, params))
            return 0, jax.random.key(run.seed), mesh.place(self._devices, state)
        path = self._checkpoints.path(latest)
        if not run.resume:
            raise ConfigError(
                f"{path}: run.resume is false, but there is a checkpoint: choose another run.folder, or "
                "remove the old one"
            )
        weights = drafts.abstract_params(self._job.config)
        shapes = jax.eval_shape(partial(init_state, self._job.setup), weights)
        like = mesh.abstract(self._devices, shapes)
        state, saved = self._checkpoints.restore(latest, like, self._contract)
        self._data.set_state(saved.data)
        if latest > self.total:
            raise ConfigError(
                f"{path}: the run is beyond its {self.total} steps: raise run.steps (or run.epochs), or write its "
                "best draft with `python -m train export`"
            )
        return latest, jax.random.wrap_key_data(jnp.asarray(saved.key, jnp.uint32)), state

    def train(self, log: Records, stop: Stop) -> None:
        """All steps that are left, unless asked to stop: then what is done is saved. Raises NotFinite."""
        job, run = self._job, self._job.settings.run
        interval = Interval()
        progress = Progress("training", self.total, "steps", self.step)
        shown = ""
        while self.step < self.total:
            item = next(self._data)
            began = time.monotonic()
            setup = at_step(job.setup, self.step)
            rate = learning_rate(job.settings.optimizer, self.step, self.total)
            self._state, measured, norm = train_step(
                setup,
                self._target,
                self._state,
                mesh.feed(self._devices, item.batch),
                jax.random.fold_in(self._key, self.step),
                np.float32(rate),
                self._frequency,
            )
            interval.add(Step(self.step, item, measured, norm), (setup, item.width), time.monotonic() - began)
            self.step += 1
            stopping = stop.requested(self.step)
            last = self.step == self.total
            evaluating = last or self.step % run.evaluate_every == 0
            saving = evaluating or stopping or self.step % run.checkpoint_every == 0
            if saving or self.step % run.log_every == 0:
                numbers = self._drain(interval)
                log.write(TRAIN, self.step, {**numbers, "rate": rate, "epoch": item.epoch})
                shown = f"loss {numbers['loss']:.3f}, tau {numbers['tau_uniform']:.2f}"
            if progress.due():
                progress.show(self.step, shown)
            found = self._evaluate(log) if evaluating else None
            if saving:
                self._save(found)
            if stopping:
                return

    def _evaluate(self, log: Records) -> dict[str, Any]:
        job = self._job
        found = evaluate.held_out(
            job.setup, self._target, self._state.params, job.held_out, self._rows, self._width, job.stores[1]
        )
        log.write(EVALUATION, self.step, found)
        return found

    def _save(self, evaluation: dict[str, Any] | None) -> None:
        key = jax.random.key_data(self._key).tolist()
        saved = Saved(self.step, self._contract, key, self._data.get_state(), evaluation)
        self._checkpoints.save(self._state, saved)

    def _drain(self, interval: Interval) -> dict[str, Any]:
        try:
            return interval.drain()
        except NotFinite as error:
            wrong = error.args[0]
            path = self._job.settings.within(NOT_FINITE)
            if jax.process_index() == 0:
                with replacing(path) as file:
                    file.write(plain_json.text(wrong).encode())
            last = self._checkpoints.latest
            raise NotFinite(
                f"the loss is {wrong['loss']} and its gradient's norm {wrong['gradient_norm']} at step "
                f"{wrong['step']}: the batch is described in {path}; the last checkpoint is "
                f"{'none' if last is None else self._checkpoints.path(last)}: lower optimizer.rate, or look at "
                "these conversations"
            ) from None


@dataclass(frozen=True)
class Step:
    """An update that was sent to the device: its number, what it reads, what it measures."""

    number: int
    item: pipeline.Item
    measured: Metrics
    norm: jax.Array


class Interval:
    """The steps since the last line of the log."""

    def __init__(self) -> None:
        self._compiled: set[Any] = set()
        self._begin()

    def _begin(self) -> None:
        self._steps: list[Step] = []
        self._compiling = 0.0
        self._began = time.monotonic()

    def add(self, step: Step, program: Any, seconds: float) -> None:
        """program: what decides which compiled one runs; the first call of each compiles in `seconds`."""
        if program not in self._compiled:
            self._compiled.add(program)
            self._compiling += seconds
        self._steps.append(step)
        if len(self._steps) > _AHEAD:
            jax.block_until_ready(self._steps[-1 - _AHEAD].norm)

    def drain(self) -> dict[str, Any]:
        """Fetches, checks and sums what the steps measured, and begins the next interval. NotFinite holds a
        dict that describes the first bad step."""
        jax.block_until_ready(self._steps[-1].norm)
        fetched = [(mesh.host(step.measured), float(step.norm)) for step in self._steps]
        for step, (measured, norm) in zip(self._steps, fetched, strict=True):
            loss = float(measured.loss / max(measured.weight, 1e-9))
            if not (math.isfinite(loss) and math.isfinite(norm)):
                rows = step.item.rows.tolist()
                raise NotFinite(
                    {
                        "step": step.number,
                        "loss": loss,
                        "gradient_norm": norm,
                        "epoch": step.item.epoch,
                        "width": step.item.width,
                        "rows": rows,
                    }
                )
        total = fetched[0][0]
        for measured, _ in fetched[1:]:
            total = jax.tree.map(np.add, total, measured)
        seconds = max(time.monotonic() - self._began - self._compiling, 1e-9)
        numbers = {
            **losses.summary(total),
            "gradient_norm": max(norm for _, norm in fetched),
            "steps": len(fetched),
            "seconds": round(seconds, 3),
            "compile_seconds": round(self._compiling, 3),
            "draft_tokens_per_second": round(float(total.seen.sum()) / seconds, 1),
        }
        self._begin()
        return numbers


def learning_rate(choice: Optimizer, step: int, total: int) -> float:
    """Of update `step` (from 0) of `total`: rises in a line to choice.rate over the share choice.warmup, then
    falls as half a cosine to choice.final of it, which the last update has."""
    warm = math.ceil(choice.warmup * total)
    if step < warm:
        return choice.rate * (step + 1) / warm
    part = (step - warm) / max(1, total - 1 - warm)
    return choice.rate * (choice.final + (1 - choice.final) * 0.5 * (1 + math.cos(math.pi * part)))


def contract(job: Job) -> dict[str, Any]:
    """What a checkpoint and the run that continues it must agree on. (The data: pipeline.Batches checks.)"""
    shape = dataclasses.asdict(job.config)
    shape = {"layers" if name == "num_layers" else name: value for name, value in shape.items()}
    return {**shape, "target": features.target_digest(job.target), "loss": job.setup.loss}


def _ordinary_text(training: Corpus) -> jax.Array:
    """[4, n] without padding, n at most 256: of the longest conversations."""
    longest = np.argsort(training.length, kind="stable")[-4:]
    return jnp.asarray(training.tokens[longest, : min(256, int(training.length[longest].min()))])


def _closing(settings: Settings, outcome: Outcome) -> list[str]:
    folder = settings.folder
    if outcome.stopped is not None:
        name = signal.Signals(outcome.stopped).name
        return [
            f"stopped by {name} after step {outcome.step} of {outcome.total}, which is saved in "
            f"{folder / 'checkpoints'}: the same command continues"
        ]
    found = outcome.evaluation
    return [
        f"trained {outcome.total} steps; the best checkpoint, step {found['step']}: tau {found['walk']:.3f} by the "
        f"walk, {found['tau_uniform']:.3f} at uniform anchors, on held-out conversations",
        f"draft: {settings.folder / trained.DRAFT}; curves: {folder / 'plots'}",
        "next: python -m train evaluate, with the same flags",
    ]
