"""`inspect`: what a file is, and what is wrong with it. `demo`: both decoders, told honestly."""

from __future__ import annotations

import re
from pathlib import Path

import folders
import hybrid_gguf
import pytest
import writers

from dflash_jax import targets, testing
from infer import demo
from infer.__main__ import main
from infer.lossless import Divergence
from infer.session import Session
from infer.settings import Settings


@pytest.fixture
def inspect(models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(models)

    def command(*flags: str) -> tuple[int, str, str]:
        return (main(["inspect", *flags]), *capsys.readouterr())

    return command


def fact(out: str, name: str) -> str:
    found = re.search(rf"^  {name} +(.*)$", out, re.MULTILINE)
    assert found, f"no {name} in\n{out}"
    return found[1]


def test_a_target(inspect) -> None:
    status, out, err = inspect("target")
    assert status == 0 and err == ""
    assert out.startswith("target: a target (Hugging Face folder)\n")
    assert fact(out, "family") == "llama"
    assert fact(out, "layers") == "2, hidden 32, MLP 48"
    assert fact(out, "context") == str(folders.CONTEXT)
    assert "stops at 258 '<|im_end|>'" in fact(out, "tokenizer")
    # 2 layers x 2 (k, v) x 2 heads x 8 wide x 4 bytes
    assert fact(out, "cache") == "0.2 KiB as float32, 0.1 KiB as bfloat16 per token"
    assert fact(out, "trail") == "4.0 KiB as float32, 2.0 KiB as bfloat16 of 16 nodes"
    # 2 tables of 260 x 32; in 2 layers 2 x 32 x 32 (q, o), 2 x 16 x 32 (k, v), 3 x 48 x 32 and 2 norms; a norm
    assert fact(out, "parameters") == "32,160"
    assert fact(out, "problems") == "none"


def test_a_draft_and_its_target(inspect) -> None:
    status, out, err = inspect("draft", "--target", "target")
    assert status == 0 and err == ""
    assert fact(out, "block size") == "4 (anchor and 3 candidates)"
    assert fact(out, "taps") == "layers 0, 1 of 2"
    assert fact(out, "mask id") == str(folders.MASK)
    assert fact(out, "attention") == "bidirectional"
    assert fact(out, "fits") == "the target's hidden size, vocabulary and depth"
    assert fact(inspect("draft")[1], "fits") == "not checked: name a target with --target"


def test_a_gguf_file(inspect, tmp_path: Path) -> None:
    writers.gguf_target(tmp_path / "model.gguf", "qwen3", writers.target_tensors("qwen3"))
    _, out, _ = inspect(str(tmp_path / "model.gguf"))
    assert "a target (GGUF file)" in out and fact(out, "family") == "qwen3"


def test_a_hybrid_with_experts(inspect, tmp_path: Path) -> None:
    config = testing.target_config("qwen3_5_moe", num_layers=4)
    params = testing.random_params(targets.abstract_params(config))
    hybrid_gguf.write(tmp_path / "model.gguf", config, params)
    _, out, _ = inspect(str(tmp_path / "model.gguf"))
    assert fact(out, "recurrent") == (
        "2 of 4 layers: 6 value heads, 10 wide, over 2 key heads, 8 wide; convolution of 4"
    )
    assert fact(out, "rotates") == "4 of 16 dimensions of a head"
    assert fact(out, "experts") == "5 in 4 of 4 layers, 2 a token, MLP 12, and one of 20 for every token"
    # 2 attention layers x 2 (k, v) x 2 heads x 16 wide x 4 bytes; 2 recurrent ones x (6 x 8 x 10 float32, and
    # 3 inputs of 92 channels)
    assert fact(out, "cache") == "0.5 KiB as float32, 0.2 KiB as bfloat16 per token"
    assert fact(out, "state") == "5.9 KiB as float32, 4.8 KiB as bfloat16, whatever the length"
    # 16 nodes: 8 KiB of keys and values; 2 x 16 x (2 x 8 + 6 x 11 or 6 x 8 x 10, and 92) x 4
    assert fact(out, "trail") == "29.8 KiB as float32, 20.0 KiB as bfloat16 of 16 nodes, --rollback tape"
    assert "79.5 KiB as float32, 69.8 KiB as bfloat16 of 16 nodes, --rollback states" in out


def test_all_problems_are_listed(inspect, models: Path) -> None:
    folder = models / "broken"
    if not folder.exists():
        folders.draft(folder, num_target_layers=5, intermediate_size=50)
    status, out, err = inspect("broken", "--target", "target")
    assert status == 2
    assert "    - the draft belongs to another target: its depth is 5" in out
    assert "mlp.up_proj.weight is [48, 32], expected [50, 32]" in out
    assert err.startswith("error: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere", "no short name"),
        ("nowhere.gguf", "no such file"),
        (".", "has no config.json: not a model folder"),
    ],
)
def test_what_is_no_model(inspect, name: str, says: str) -> None:
    status, _, err = inspect(name)
    assert status == 2 and says in err and err.count("\n") == 1


def test_other_drafts_are_named(inspect, tmp_path: Path) -> None:
    folders.draft(tmp_path / "other", architectures=["DFlash2DraftModel"])
    status, out, err = inspect(str(tmp_path / "other"))
    assert status == 2 and "a DFlash 2 draft" in err and ": a draft" in out


def test_a_target_is_not_checked_against_a_target(inspect) -> None:
    assert inspect("target", "--target", "target")[0] == 2


# --- demo -------------------------------------------------------------------------------------------------


def test_demo_with_an_untrained_draft_says_so(
    models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "PROMPTS", ("hi", "hello, you"))
    flags = ["--target", str(models / "target"), "--max-new-tokens", "5", "--block-size", "4"]
    assert main(["demo", *flags]) == 0
    out, err = capsys.readouterr()
    assert "draft untrained, block 4" in out and "The draft is untrained" in out
    assert "2 of 2 answers have the same tokens" in out
    assert out.count(" rounds\n") == 4 and err == ""


def test_demo_with_a_draft_that_helps(
    fluent: Session, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "PROMPTS", ("hi",))
    results, compiling = demo.measure(fluent, Settings(max_new_tokens=9))
    assert compiling >= 0 and results[0].same() == "yes"
    assert results[0].fast.stats.committed[0] == [4, 4]
    said = demo.verdict(fluent.pair, results, 4.0)
    assert "1 of 1 answers have the same tokens" in said
    assert ("DFlash is slower here" in said) != ("times as fast" in said)


def test_a_difference_is_told_from_a_near_tie(fluent: Session) -> None:
    answer = fluent.complete("hi", Settings(max_new_tokens=3))
    for gap, near, said in ((1e-6, True, "near-tie at 1"), (0.5, False, "BUG at 1")):
        both = demo.Both("hi", answer, answer, Divergence(0, 1, 97, 98, gap, near))
        assert both.same().startswith(said)


def test_histogram() -> None:
    lines = demo.histogram([1, 1, 1, 2, 4], 4, width=10)
    assert [line.split()[0] for line in lines] == ["0", "1", "2", "3"]
    assert [line.count("█") for line in lines] == [6, 2, 0, 2]
