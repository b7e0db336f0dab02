"""Runs that are killed, stopped, and shared by two processes: real processes, real signals."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from functools import partial
from pathlib import Path

import fitting
import jax
import numpy as np
import pytest

from dflash_jax import drafts
from train import mesh, settings
from train.checkpoints import Checkpoints, Saved, about
from train.step import State, init_state
from train.stop import Stop

LIMIT = 240  # seconds: a loaded machine compiles slowly


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    fitting.fit(folder)
    return folder


def test_kill_9_in_a_checkpoint_write_and_resume_is_an_uninterrupted_run(
    uninterrupted: Path, tmp_path: Path
) -> None:
    """Losses and parameters to the last bit. Killed while step 4 is written, with step 4 already logged and
    evaluated: the run continues from step 2."""
    process = fitting.start(tmp_path, kill_writing=4, devices=8)
    _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == -signal.SIGKILL, errors
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names[0] == "2" and names[1].startswith("4.") and len(names) == 2
    assert max(line["step"] for line in fitting.metrics(tmp_path)) == 4
    assert fitting.fit(tmp_path).step == 6
    assert fitting.metrics(tmp_path) == fitting.metrics(uninterrupted)
    jax.tree.map(np.testing.assert_array_equal, last(tmp_path), last(uninterrupted))
    exported = [(folder / "draft" / "model.safetensors").read_bytes() for folder in (tmp_path, uninterrupted)]
    assert exported[0] == exported[1]


def last(folder: Path) -> tuple[State, Saved]:
    """The last checkpoint: weights, moments, step count, key, position in the data, evaluation."""
    weights = drafts.abstract_params(fitting.DRAFT)
    state = jax.eval_shape(partial(init_state, fitting.job(folder).setup), weights)
    like = mesh.abstract(mesh.make(settings.Mesh(data=1)), state)
    with Checkpoints(folder / "checkpoints", 2) as checkpoints:
        assert checkpoints.latest == 6
        return checkpoints.restore(6, like, about(checkpoints.path(6)).contract)


def test_sigterm_saves_and_stops(tmp_path: Path) -> None:
    number = signal.SIGTERM
    process = fitting.start(
        tmp_path, steps=100_000, checkpoint_every=100_000, evaluate_every=100_000, devices=8
    )
    deadline = time.monotonic() + LIMIT
    while not (tmp_path / "metrics.jsonl").exists() or len(fitting.metrics(tmp_path)) < 2:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    output, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 128 + number, errors
    assert "Traceback" not in errors
    told = json.loads(output.splitlines()[-1])
    with Checkpoints(tmp_path / "checkpoints", 2) as checkpoints:
        assert checkpoints.latest == told["step"] > 0
    assert not (tmp_path / "draft").exists()
    assert fitting.fit(tmp_path, steps=told["step"] + 2).step == told["step"] + 2
    steps = [line["step"] for line in fitting.metrics(tmp_path) if line["kind"] == "train"]
    assert steps == sorted(set(steps)) and told["step"] in steps


def test_the_second_ctrl_c_interrupts() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Stop() as stop:
        assert not stop.requested(1)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested(2) and stop.signal == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_two_processes_have_the_losses_of_one(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    changes = {"data": 1, "fsdp": 2}
    one = tmp_path / "one"
    fitting.fit(one, **changes)
    two = tmp_path / "two"
    processes = [
        fitting.start(two, coordinator=address, processes=2, process_id=i, **changes) for i in range(2)
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=LIMIT)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    found, wanted = fitting.metrics(two), fitting.metrics(one)
    assert [(line["kind"], line["step"]) for line in found] == [
        (line["kind"], line["step"]) for line in wanted
    ]
    for name in ("loss", "accuracy", "gradient_norm"):
        rows = [[line[name] for line in lines if name in line] for lines in (found, wanted)]
        np.testing.assert_allclose(np.hstack(rows[0]), np.hstack(rows[1]), rtol=1e-4)
