"""`fit`: what it leaves, what it refuses to continue, and what it does when a loss is not a number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fitting
import jax
import numpy as np
import pytest
from tiny import draft_config

from dflash_jax import drafts
from dflash_jax.config import ConfigError
from dflash_jax.weights import hf
from train import lock, loop, pipeline, plots, records
from train.checkpoints import Checkpoints, about, read_params
from train.settings import Optimizer


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    outcome = fitting.fit(folder)
    assert outcome.step == outcome.total == 6 and outcome.stopped is None
    return folder


def test_a_run_leaves_metrics_curves_and_the_draft(finished: Path) -> None:
    lines = fitting.metrics(finished)
    assert [(line["kind"], line["step"]) for line in lines] == [
        ("train", 2), ("train", 4), ("evaluation", 4), ("train", 6), ("evaluation", 6),
    ]  # fmt: skip
    assert all(np.isfinite(line["loss"]) for line in lines)
    assert lines[3]["loss"] < lines[0]["loss"]
    for name in ("loss", "tau", "accuracy"):
        assert (finished / "plots" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    with Checkpoints(finished / "checkpoints", 2) as checkpoints:
        best = checkpoints.path(checkpoints.best or 0)
    abstract = drafts.abstract_params(fitting.DRAFT)
    exported = hf.load_draft(finished / "draft", fitting.DRAFT, abstract, np.dtype(np.float32))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=8e-3), exported, read_params(best, abstract)
    )
    assert (finished / "draft" / "README.md").exists()


def test_a_finished_run_is_only_exported_again(finished: Path) -> None:
    before = fitting.metrics(finished)
    (finished / "draft" / "model.safetensors").unlink()
    assert fitting.fit(finished).step == 6
    assert fitting.metrics(finished) == before
    assert (finished / "draft" / "model.safetensors").exists()


def test_fewer_steps_than_it_has_are_refused(finished: Path) -> None:
    with pytest.raises(ConfigError, match=r"checkpoints.6: the run is beyond its 4 steps: raise run\.steps"):
        fitting.fit(finished, steps=4)


def test_a_folder_has_one_fit_at_a_time(tmp_path: Path) -> None:
    with lock.alone(tmp_path), pytest.raises(ConfigError, match=r"another `fit` is running there"):
        fitting.fit(tmp_path)
    assert not (tmp_path / "checkpoints").exists()
    with lock.alone(tmp_path):  # the file is there, as a killed run leaves it
        pass


@pytest.mark.parametrize(
    ("field", "changes"),
    {
        "block_size": {"draft": draft_config(num_layers=1, num_target_layers=2, taps=(0, 1), block_size=5)},
        "taps": {"draft": draft_config(num_layers=1, num_target_layers=2, taps=(1, 0))},
        "mask_token_id": {
            "draft": draft_config(num_layers=1, num_target_layers=2, taps=(0, 1), mask_token_id=2)
        },
        "layers": {"draft": draft_config(num_layers=2, num_target_layers=2, taps=(0, 1))},
        "target": {"of": fitting.target(seed=1)},
        "loss": {"loss": "dpace"},
    }.items(),
)
def test_another_contract_is_refused_by_name(finished: Path, field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"made with {field} .* choose another run\.folder"):
        fitting.fit(finished, **changes)


def test_other_batches_are_refused(finished: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.seed"):
        fitting.fit(finished, seed=1)


def test_resume_false_does_not_touch_an_earlier_run(finished: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.resume is false"):
        fitting.fit(finished, resume=False)


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    fitting.fit(tmp_path, steps=2)
    with pytest.raises(loop.NotFinite, match=r"at step 3: .*not-finite\.json.*checkpoints/2: lower"):
        # update 2 throws the weights away; step 3 meets them, and both are looked at together after 4
        fitting.fit(tmp_path, steps=8, rate=1e30)
    found = json.loads((tmp_path / loop.NOT_FINITE).read_text())
    made = fitting.job(tmp_path)
    data = pipeline.batches(made.training, made.settings.data, accumulate=1, seed=0)
    items = [next(data) for _ in range(4)]
    assert found["step"] == 3 and found["rows"] == items[3].rows.tolist() and found["width"] == 16
    assert fitting.fit(tmp_path, steps=4).step == 4  # from the good checkpoint
    assert [line["step"] for line in fitting.metrics(tmp_path) if line["kind"] == "train"] == [2, 4]


def test_the_last_checkpoints_and_the_best_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    walks = iter([1.5, 1.2, 1.4, 1.1, 1.3])
    found = {"loss": 1.0, "accuracy": [0.5] * 3, "recall16": [0.5] * 3, "tau_uniform": 1.0}
    monkeypatch.setattr(
        loop.evaluate,
        "held_out",
        lambda *_: {**found, "walk": next(walks), "walk_greedy": 1.0, "walk_sampled": 1.0},
    )
    outcome = fitting.fit(tmp_path, steps=5, evaluate_every=1, checkpoint_every=1, keep=2)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["1", "4", "5"]
    assert outcome.evaluation["step"] == 1 and outcome.evaluation["walk"] == 1.5


def test_init_from_begins_at_step_0_with_those_weights(finished: Path, tmp_path: Path) -> None:
    draft = finished / "draft"
    fitting.fit(tmp_path, steps=1, init_from=draft, rate=1e-30)
    abstract = drafts.abstract_params(fitting.DRAFT)
    path = tmp_path / "checkpoints" / "1"
    given = hf.load_draft(draft, fitting.DRAFT, abstract, np.dtype(np.float32))
    jax.tree.map(np.testing.assert_array_equal, read_params(path, abstract), given)
    assert about(path).step == 1


def test_the_rate_rises_and_falls() -> None:
    choice = Optimizer(rate=2.0, warmup=0.2, final=0.1)
    rates = [loop.learning_rate(choice, step, 11) for step in range(11)]
    np.testing.assert_allclose(rates[:4], [2 / 3, 4 / 3, 2.0, 2.0], rtol=1e-6)
    assert rates[3:] == sorted(rates[3:], reverse=True)
    np.testing.assert_allclose(
        [rates[7 - 1], rates[-1]], [2 * (0.1 + 0.9 * (1 + np.cos(np.pi * 3 / 7)) / 2), 0.2]
    )
    assert loop.learning_rate(Optimizer(rate=1.0, warmup=0.0), 0, 1) == 1.0


def test_a_walk_that_is_no_number_is_drawn(tmp_path: Path) -> None:
    slots = {"loss": 1.0, "accuracy": [0.5], "tau_uniform": 1.0}
    with records.Records(fitting.job(tmp_path).settings, 0) as log:
        for step, walk in ((1, float("nan")), (2, 1.5)):
            log.write(records.EVALUATION, step, {**slots, "walk": walk})
    assert [line["walk"] for line in fitting.metrics(tmp_path)] == [None, 1.5]
    assert len(plots.draw(tmp_path)) == 3


def test_metrics_of_a_killed_run_are_written_again(tmp_path: Path) -> None:
    made = fitting.job(tmp_path).settings
    with records.Records(made, 0) as log:
        for step in (2, 4, 6):
            log.write("train", step, {"loss": float(step)})
    with (tmp_path / records.FILE).open("a") as file:
        file.write('{"kind": "tr')
    with records.Records(made, 4) as log:
        log.write("train", 6, {"loss": 60.0})
    assert [line["loss"] for line in records.read(tmp_path / records.FILE)] == [2.0, 4.0, 60.0]
    (tmp_path / records.FILE).write_text('{"kind": "tr\n{"step": 1}\n')
    with pytest.raises(ConfigError, match="line 1"):
        records.read(tmp_path / records.FILE)
