"""Every file of configs/ is a short name and a recipe; what is misspelt is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_jax import shortnames
from dflash_jax.config import ConfigError, default_taps
from train import loss, settings
from train.parse import parse

CONFIGS = sorted(shortnames.CONFIGS.glob("*.toml"))
PAPER = {"qwen3-4b": (36, 16), "qwen3-8b": (36, 16), "llama-3.1-8b": (32, 10)}  # depth, block size


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_loads(path: Path) -> None:
    found = settings.read(path)
    assert found.name == found.target == path.stem
    assert parse(["fit", "--config", path.stem]).settings == found


def test_those_that_were_promised_are_there() -> None:
    names = {path.stem for path in CONFIGS}
    assert {"smollm2", "smollm2-gpu", "tiny", "tiny-hybrid", *PAPER} <= names


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_recipe(name: str) -> None:
    depth, size = PAPER[name]
    found = settings.read(shortnames.CONFIGS / f"{name}.toml")
    assert (found.model.layers, found.model.block_size, found.objective.anchors) == (5, size, 512)
    assert found.model.taps == default_taps(depth, 5)
    assert found.objective.loss == "decay" and found.objective.gamma == loss.default_gamma(size)
    assert (found.data.max_length, found.run.epochs, found.run.steps) == (3072, 6, None)
    assert (found.optimizer.rate, found.optimizer.warmup, found.optimizer.clip) == (6e-4, 0.04, 1)
    assert found.data.files == (found.regenerate.out,), "what regenerate writes is what fit reads"


@pytest.mark.parametrize("name", ["tiny", "tiny-hybrid"])
def test_a_tiny_target_is_where_its_command_puts_it(name: str) -> None:
    found = settings.read(shortnames.CONFIGS / f"{name}.toml")
    assert shortnames.find(name).target.path == str(found.within(found.language_model.out))
    longest = found.synthesize.prompt_tokens + found.synthesize.answer_tokens
    assert longest <= found.language_model.length == found.data.max_length


def test_the_hybrid_recipe_repeats_key_heads() -> None:
    found = settings.read(shortnames.CONFIGS / "tiny-hybrid.toml").language_model
    assert found.family == "qwen3_5" and found.value_heads > found.key_heads


def test_both_smollm2_recipes_are_for_one_file() -> None:
    assert shortnames.find("smollm2-gpu").target == shortnames.find("smollm2").target


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("[objective]\nanchors", "[objective]\nanchor", r"objective\.anchor is not a setting .*'anchors'"),
        ("[optimizer]", "[optimiser]", r"optimiser is not a setting .*'optimizer'"),
        ("block_size = 8", 'block_size = "8"', r"model\.block_size is '8': it must be int"),
        ("[run]", '[run]\ntarget_dtype = "float16"', r"run\.target_dtype is 'float16': .*'bfloat16'"),
    ],
)
def test_what_is_misspelt_is_named_with_its_file(tmp_path: Path, old: str, new: str, says: str) -> None:
    text = (shortnames.CONFIGS / "tiny.toml").read_text()
    assert old in text
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(old, new))
    with pytest.raises(ConfigError, match=rf"^{path}: {says}"):
        settings.read(path)


def test_an_unknown_flag_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"--objective\.anchor.*did you mean '--objective\.anchors'"):
        parse(["fit", "--config", "tiny", "--objective.anchor", "3"])
