"""`synthetic` at a tiny shape: acceptance is forced both ways, and what is said about speed follows from times."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from dflash_jax import decode, testing
from dflash_jax.policy import Fixed
from dflash_jax.state import Options
from infer import published, synthetic
from infer.__main__ import main

SIZE = 3


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two shapes with many tokens, so that random candidates are wrong."""
    monkeypatch.setitem(published.SHAPES, "tiny", testing.target_config("qwen3", vocab_size=257))
    monkeypatch.setitem(published.SHAPES, "smollm2-135m", testing.target_config("llama", vocab_size=257))


def test_a_row_for_every_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "out"
    sizes = ("--block-sizes", f"2,{SIZE}", "--contexts", "9", "--draft-layers", "1", "--repeats", "1")
    assert main(["synthetic", "tiny", *sizes, "--out", str(out)]) == 0
    results = json.loads((out / synthetic.RESULTS).read_text())
    assert [(row["model"], row["context"], row["block_size"]) for row in results["rows"]] == [
        ("tiny", 9, 2),
        ("tiny", 9, SIZE),
    ]
    row = results["rows"][-1]
    assert list(row["speedup"]) == ["2", "3"]
    assert row["speedup"]["3"] == pytest.approx(3 * row["ar_ms"] / row["round_ms"])
    assert set(row["stages"]) == {f"{name}_ms" for name in ("draft", "verify", "accept", "commit", "round")}
    assert min(results["ceiling"].values()) > 0 and results["settings"]["draft_layers"] == 1
    printed, table = capsys.readouterr().out, (out / synthetic.TABLE).read_text()
    assert "tau * ar / round" in printed and table.count("| tiny | 9 |") == 2
    assert (out / "speedup.png").read_bytes().startswith(b"\x89PNG")


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


def test_the_preset_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["synthetic", "--preset", "gpu", "--out", str(tmp_path)]) == 0
    assert "preset gpu needs a GPU and there is none here" in capsys.readouterr().err
    [row] = json.loads((tmp_path / synthetic.RESULTS).read_text())["rows"]
    assert (row["model"], row["block_size"]) == ("smollm2-135m", 4)


def test_no_size_is_begun_after_the_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["synthetic", "tiny", "--contexts", "9", "--minutes", "1e-6"]) == 0
    assert "minutes are used up" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "name a model: smollm2-135m"),
        (("qwen3-8",), "no shape has the name 'qwen3-8'"),
        (("tiny", "--block-sizes", "1"), "blocks of at least 2"),
        (("tiny", "--contexts", "0"), "must be positive"),
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
