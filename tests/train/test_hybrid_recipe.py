"""configs/tiny-hybrid.toml, made smaller: from Python's sources to a hybrid target, its draft, and the proof
that they decode losslessly in every mode. The recipe at its own size is the same commands without flags."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infer.__main__ import main as infer
from train.__main__ import main as train

SMALLER = {
    "language_model.steps": 150,
    "language_model.layers": 2,
    "language_model.interval": 2,
    "language_model.hidden_size": 64,
    "language_model.intermediate_size": 128,
    "language_model.prompts": 16,
    "synthesize.conversations": 200,
    "run.steps": 100,
}


@pytest.mark.slow
def test_the_recipe_makes_a_pair_that_is_lossless_in_every_mode(tmp_path: Path) -> None:
    """From features on the disk, which the recipe computes in every step."""
    folder = tmp_path / "run"
    config = tmp_path / "hybrid.toml"
    recipe = (Path(__file__).parents[2] / "configs" / "tiny-hybrid.toml").read_text()
    config.write_text(recipe.replace("runs/tiny-hybrid", str(folder)))
    flags = ["--config", str(config), "--run.folder", str(folder)]
    for name, value in SMALLER.items():
        flags += [f"--{name}", str(value)]
    for command in ("target", "synthesize", "features"):
        assert train([command, *flags]) == 0
    assert train(["fit", *flags, "--features.source", "offline"]) == 0
    assert train(["evaluate", *flags, "--out", str(tmp_path / "evaluation.json")]) == 0
    taus = [run["tau"] for run in json.loads((tmp_path / "evaluation.json").read_text())["decoder"]["runs"]]
    assert taus[0] > 1.3  # an untrained draft is right once in a thousand slots

    out = tmp_path / "check.json"
    pair = ["--target", str(folder / "target"), "--draft", str(folder / "draft")]
    how = [
        "--prompts",
        str(folder / "prompts.jsonl"),
        "--max-new-tokens",
        "24",
        "--batch",
        "8",
        "--every-mode",
    ]
    assert infer(["check", *pair, *how, "--out", str(out)]) == 0
    arms = json.loads(out.read_text())["arms"]
    greedy = [arm for arm in arms if arm["temperature"] == 0 and arm["decoder"] != "autoregressive"]
    assert len(greedy) == 24 and min(arm["tau"] for arm in greedy) > 1.3
