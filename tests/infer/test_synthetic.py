"""`synthetic` at a tiny shape: acceptance is forced both ways, and what is said about speed follows from times."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from dflash_jax import decode, testing
from dflash_jax.config import ConfigError
from dflash_jax.policy import Fixed
from dflash_jax.state import Options
from infer import published, synthetic
from infer.__main__ import main
from infer.bench import stages

SIZE = 3


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape with many tokens, so that random candidates are wrong; and no time for ceilings."""
    monkeypatch.setitem(published.SHAPES, "tiny", testing.target_config("qwen3", vocab_size=257))
    monkeypatch.setattr(stages, "_BYTES", 2**20)
    monkeypatch.setattr(stages, "_SIDE", 64)
    monkeypatch.setattr(stages, "_MOST", 2**22)


def test_a_row_for_every_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "out"
    sizes = ("--block-sizes", str(SIZE), "--contexts", "9", "--draft-layers", "1", "--repeats", "1")
    assert main(["synthetic", "tiny", *sizes, "--out", str(out)]) == 0
    results = json.loads((out / synthetic.RESULTS).read_text())
    [row] = results["rows"]
    assert (row["model"], row["context"], row["block_size"]) == ("tiny", 9, SIZE)
    assert list(row["speedup"]) == ["2", "3"]
    assert row["speedup"]["3"] == pytest.approx(3 * row["ar_ms"] / row["round_ms"])
    assert set(row["stages"]) == {f"{name}_ms" for name in ("draft", "verify", "accept", "commit", "round")}
    assert min(results["ceiling"].values()) > 0 and results["settings"]["draft_layers"] == 1
    printed, table = capsys.readouterr().out, (out / synthetic.TABLE).read_text()
    assert "tau * ar / round" in printed and table.count("| tiny | 9 |") == 1
    assert (out / "speedup.png").read_bytes().startswith(b"\x89PNG")


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a byte of it is made."""
    monkeypatch.setattr(synthetic, "_free", lambda device: 1000)
    with pytest.raises(ConfigError, match=r"tiny needs 0 GiB, cpu:0 has 0 free"):
        synthetic.random_models("tiny", SIZE, 1, "float32", jax.devices()[0])
    monkeypatch.undo()
    assert (synthetic._free(jax.devices()[0]) or 2**40) > 2**28


def test_acceptance_is_forced() -> None:
    """All candidates with a head of zeros, hardly any with a random one."""
    models = synthetic.random_models("tiny", SIZE, 1, "float32", jax.devices()[0])
    options = Options(Fixed(SIZE))
    taus = []
    for of in (models, synthetic.agreeing(models)):
        state = decode.prefill(of, [[5, 6, 7]], options, max_new_tokens=1 + 4 * SIZE)
        taus.append((1 + 4 * SIZE - 1) / int(decode.generate(of, state, options).rounds))
    assert taus[0] < 1.5 and taus[1] == SIZE
    assert np.isfinite(np.asarray(models.target_params["lm_head"]["weight"])).all()


@pytest.mark.parametrize(("backend", "count"), [("cpu", 1), ("gpu", 3)])
def test_the_preset(
    backend: str, count: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several models for a GPU; where there is none, a small one, with a sentence."""
    asked = []
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(synthetic, "random_models", lambda name, *_: asked.append(name))
    monkeypatch.setattr(synthetic, "cells", lambda models, name, flags, begin: iter(()))
    assert main(["synthetic", "--preset", "gpu"]) == 2  # nothing was timed
    said = "preset gpu needs a GPU and there is none here" in capsys.readouterr().err
    assert said == (backend == "cpu") and len(asked) == count
    assert set(asked) <= set(published.SHAPES) and (asked == ["smollm2-135m"]) == said


def test_no_size_is_begun_after_the_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["synthetic", "tiny", "--contexts", "9", "--minutes", "1e-6"]) == 2
    err = capsys.readouterr().err
    assert "minutes are used up: tiny is not timed" in err and "nothing was timed in --minutes 1e-06" in err


def test_results_of_another_run_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / synthetic.RESULTS).write_text("{}")
    for out, said in (
        (tmp_path, "is of another run"),
        (tmp_path / synthetic.RESULTS / "x", "cannot be written"),
    ):
        assert main(["synthetic", "tiny", "--contexts", "9", "--out", str(out)]) == 2
        assert said in capsys.readouterr().err
    assert (tmp_path / synthetic.RESULTS).read_text() == "{}"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "name a model: smollm2-135m"),
        (("qwen3-8",), "no shape has the name 'qwen3-8'"),
        (("tiny", "--block-sizes", "1"), "blocks of at least 2"),
        (("tiny", "--contexts", "0"), "must be positive"),
        (("tiny", "--block-sizes", "2,2"), "--block-sizes: one of the values is named twice"),
        (("qwen3-8b", "--contexts", "50000"), "exceed the 40960 of qwen3-8b"),
    ],
    ids=str,
)
def test_errors_are_one_sentence(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], said: str
) -> None:
    assert main(["synthetic", *flags]) == 2
    err = capsys.readouterr().err
    assert said in err and err.startswith("error: ") and err.count("\n") == 1
