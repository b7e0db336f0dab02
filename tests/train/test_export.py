"""From a run's checkpoint to a folder with a model card."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from tiny import DRAFT, TARGET

from dflash_jax import pair
from dflash_jax.config import SLIDING, ConfigError
from dflash_jax.drafts import abstract_params as abstract_draft
from dflash_jax.targets import abstract_params
from dflash_jax.terminal import Screen
from dflash_jax.testing import random_params
from dflash_jax.weights import hf
from train import build, byte_vocabulary, card, export, loop, step
from train.checkpoints import Checkpoints, Saved
from train.settings import Data, Model, Objective, Run, Settings

EVALUATION = {
    "loss": 1.5, "accuracy": [0.5, 0.25, 0.125], "recall16": [0.9, 0.8, 0.7], "tau_uniform": 2.5, "walk": 2.25,
    "walk_greedy": 2.375, "walk_sampled": float("nan"),
}  # fmt: skip


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    target = dataclasses.replace(TARGET, vocab_size=byte_vocabulary.SIZE)
    weights = jax.tree.map(np.asarray, random_params(abstract_params(target)))
    hf.save_target(tmp_path / "target", target, weights, np.float32)
    byte_vocabulary.write(tmp_path / "target")
    lines = [
        {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"yes, {i}"}]}
        for i in range(12)
    ]
    (tmp_path / "conversations.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return Settings(
        name="test", target=str(tmp_path / "target"), run=Run(folder=tmp_path),
        data=Data(max_length=64, tokens=128, held_out=0.3), model=Model(layers=1, block_size=4, taps=(0, 2)),
        objective=Objective(anchors=7),
    )  # fmt: skip


def checkpoint(settings: Settings) -> dict:
    """Step 3 of a run, the best, and step 4, the last; returns the parameters of step 3."""
    target = build.load_target(settings)
    setup = build.make_setup(settings, target, build.draft_config(settings, target))
    job = loop.Job(settings, setup, target, None, None, {})  # type: ignore[arg-type]
    with Checkpoints(settings.within(Path("checkpoints")), 2) as found:
        for at, walk in ((3, 2.25), (4, 2.0)):
            params = random_params(abstract_draft(setup.draft.config), at)
            saved = Saved(at, loop.contract(job), [0, 0], {}, {**EVALUATION, "walk": walk})
            found.save(step.init_state(setup, params), saved)
            found.finish()
    return random_params(abstract_draft(setup.draft.config), 3)


def test_the_best_checkpoint_becomes_a_draft(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    params = checkpoint(settings)
    with Screen() as screen:
        assert export.run(settings, screen, None, None) == 0
    folder = settings.within(Path("draft"))
    assert str(folder) in capsys.readouterr().out
    loaded = pair.load(settings.target, str(folder), dtype="float32")
    assert loaded.draft is not None
    rounded = jax.tree.map(lambda x: np.asarray(x).astype(ml_dtypes.bfloat16).astype(np.float32), params)
    jax.tree.map(np.testing.assert_array_equal, loaded.draft.params, rounded)
    facts = loaded.draft.config.training
    assert (facts.loss_decay, facts.num_anchors, facts.target_name) == (2.0, 7, "target")
    assert facts.target_hash == loaded.target.config.hash()
    text = (folder / "README.md").read_text()
    assert "| held-out conversations, tau by the walk | 2.250 |" in text
    assert "| trained on | " in text and "7 blocks a conversation" in text
    assert str(settings.folder) not in text, "the folders of this machine are nobody's business"


def test_a_checkpoint_by_name_and_a_place_of_ones_own(settings: Settings, tmp_path: Path) -> None:
    checkpoint(settings)
    with Screen() as screen:
        export.run(settings, screen, str(tmp_path / "checkpoints" / "4"), tmp_path / "mine")
    assert "tau by the walk | 2.000" in (tmp_path / "mine" / "README.md").read_text()
    assert not (tmp_path / "draft").exists()


def test_settings_that_are_not_the_checkpoints_are_refused(settings: Settings) -> None:
    checkpoint(settings)
    other = dataclasses.replace(settings, model=dataclasses.replace(settings.model, block_size=5))
    with (
        Screen() as screen,
        pytest.raises(ConfigError, match=r"checkpoints.3: made with block_size 4, .* has 5"),
    ):
        export.run(other, screen, None, None)


@pytest.mark.parametrize(
    ("draft", "says"), [(None, "no checkpoint there"), ("target", "target: no checkpoint")]
)
def test_what_is_no_checkpoint_is_an_error(settings: Settings, draft: str | None, says: str) -> None:
    name = None if draft is None else str(settings.within(Path(draft)))
    with Screen() as screen, pytest.raises(ConfigError, match=says):
        export.run(settings, screen, name, None)


# --- the card -----------------------------------------------------------------------------------------


def test_a_place_that_holds_something_else_is_left_alone(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "README.md").write_text("mine")
    for place, says in (
        ("mine", "no model"),
        ("mine/README.md", "is a file"),
        ("mine/README.md/x", "below a file"),
    ):
        with pytest.raises(ConfigError, match=says):
            export.run(settings, Screen(), None, tmp_path / place)
    assert (tmp_path / "mine" / "README.md").read_text() == "mine"


def test_a_card_says_what_is_known_and_no_more() -> None:
    settings = Settings(name="qwen", target="Qwen/Qwen3-4B@abc", model=Model(start="random"))
    text = card.text(DRAFT, settings, {}, {}, "my-draft")
    assert text.startswith("---\n") and "\nbase_model: Qwen/Qwen3-4B\n" in text
    assert "## Data\n\nNot recorded." in text and "Not measured yet" in text
    assert 'vllm serve Qwen/Qwen3-4B --speculative-config \'{"method": "dflash", "model": "my-draft"' in text
    assert '"num_speculative_tokens": 3}' in text and "--speculative-num-draft-tokens 4" in text
    assert "copy of its last layers" not in text and "nan" not in text


@pytest.mark.parametrize(
    ("sources", "own"), [(["regenerate", "synthesize"], True), (["", "synthesize"], False), (None, False)]
)
def test_a_card_says_whose_answers_only_when_they_are_the_targets(
    sources: list[str] | None, own: bool
) -> None:
    report = {"files": ["a.jsonl"]} | ({} if sources is None else {"sources": sources})
    text = card.text(DRAFT, Settings(name="tiny", target="tiny"), {}, report, "d")
    assert ("whose answers the target itself gave" in text) == own
    assert ("not all of whose answers are known" in text) != own


def test_a_card_shows_every_figure_by_slot() -> None:
    runs = [{"temperature": 0.7, "tau": 1.75, "rounds": 1234, "acceptance": [0.5, 0.25, 0.0]}]
    evaluation = {**EVALUATION, "decoder": {"prompts": "gsm8k.jsonl", "runs": runs}}
    config = dataclasses.replace(DRAFT, layer_types=(SLIDING,) * 2, causal=(), sliding_window=5)
    settings = Settings(
        name="tiny", target="tiny", objective=Objective(loss="dpace", soft=0.5, candidates=512)
    )
    report = {"files": ["a.jsonl"], "conversations": 12000, "training": 11000}
    text = card.text(config, settings, evaluation, report, "d")
    for row in (
        "| accuracy | 0.50 | 0.25 | 0.12 |",
        "| recall@16 | 0.90 | 0.80 | 0.70 |",
        "| accepted, temperature 0.7 | 0.50 | 0.25 | 0.00 |",
        "| real decoder, gsm8k.jsonl, temperature 0.7 | 1.750 (1,234 rounds) |",
        "| conversations read | 12,000 |",
        "| loss | D-PACE |",
        "| sliding window | 5, 2 layers |",
    ):
        assert row in text
    assert "positions a device" not in text, "a microbatch is shared by all devices"
    assert "sampled answers" not in text, "there were none: nan is no figure"
    assert "base_model" not in text and "copy of its last layers" in text
