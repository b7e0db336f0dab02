"""What made a file of conversations is kept beside it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from dflash_jax.config import ConfigError
from train import origin


def test_a_file_is_continued_by_what_made_it_and_by_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, recipe = tmp_path / "talks.jsonl", {"target": "f" * 64, "temperatures": (0.2, 0.7), "top_p": 0.9}
    origin.keep(path, {**recipe, "target": "0" * 64})
    origin.keep(path, recipe)  # still without a line
    path.write_text("{}\n")
    origin.keep(path, recipe)
    for name, value, says in (
        ("target", "0" * 64, "talks.jsonl: was made with target ffffffffffff..., but this run has 0000"),
        ("temperatures", (0.2, 0.8), r"made with temperatures \[0.2, 0.7\], but this run has \[0.2, 0.8\]"),
    ):
        with pytest.raises(ConfigError, match=says):
            origin.keep(path, {**recipe, name: value})
    assert not caplog.records


def test_a_file_of_unknown_origin_is_continued_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "talks.jsonl"
    path.write_text("{}\n")
    with caplog.at_level(logging.WARNING):
        origin.keep(path, {"seed": 0})
    assert "what made the conversations in it is not known" in caplog.text
    assert [found.name for found in tmp_path.iterdir()] == ["talks.jsonl"]
