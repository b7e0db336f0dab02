"""`convert`, and `inspect` of what it writes: every pair of formats, sizes, wrong places, wrong pairs."""

from __future__ import annotations

import json
from pathlib import Path

import draft_files
import folders
import gguf
import numpy as np
import pytest
import writers

from dflash_jax import pair, sources
from dflash_jax.weights import gguf_export
from infer.__main__ import main

HF = "model.safetensors"


@pytest.fixture
def command(
    models: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Run in the folder of models; `tmp_path` is where results go."""
    monkeypatch.chdir(models)

    def run(*flags: object) -> tuple[int, str, str]:
        return (main([str(flag) for flag in flags]), *capsys.readouterr())

    return run


def test_every_pair_of_formats_and_back(command, tmp_path: Path) -> None:
    """hf -> gguf -> gguf-luce -> hf -> gguf-luce -> gguf -> hf: nothing is lost."""
    forms = ["gguf", "gguf-luce", "hf", "gguf-luce", "gguf", "hf"]
    source = Path("draft")
    for i, form in enumerate(forms):
        place = tmp_path / (f"{i}" if form == "hf" else f"{i}.gguf")
        status, out, err = command("convert", source, place, "--format", form)
        assert status == 0 and err == ""
        assert out.startswith(f"{place}: a draft (") and ", F32, " in out
        source = place
    first, last = tmp_path / "2", tmp_path / "5"
    for name in ("config.json", HF):
        assert (first / name).read_bytes() == (last / name).read_bytes()
    before, after = (pair.draft_config(sources.find(str(p))) for p in ("draft", last))
    assert before == after
    assert (tmp_path / "2" / HF).stat().st_size == pytest.approx(Path("draft", HF).stat().st_size, rel=0.01)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0"])
def test_types_and_sizes(command, tmp_path: Path, kind: str) -> None:
    draft = writers.hf_folder(tmp_path / "draft", writers.draft_json(), writers.draft_tensors())
    status, out, _ = command("convert", draft, tmp_path / "d.gguf", "--format", "gguf", "--type", kind)
    assert status == 0 and f"a draft (GGUF, upstream), {kind}, " in out and f"(from {draft}, " in out
    assert "note: the file has no tokenizer" in out
    kinds = {tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "d.gguf").tensors}
    assert kinds == {kind, "F32"}
    status, out, _ = command("convert", tmp_path / "d.gguf", tmp_path / "hf", "--format", "hf")
    assert status == 0 and f"{kind if kind in ('F16', 'BF16') else 'BF16'}, " in out


def test_a_target_completes_a_draft_and_names_itself(command, tmp_path: Path) -> None:
    command("convert", "draft", tmp_path / "d.gguf", "--format", "gguf", "--target", "target")
    found = pair.draft_config(sources.find(str(tmp_path / "d.gguf")))
    assert found.training.target_name == "target"
    assert found.training.target_hash == pair.target_config(sources.find("target")).hash()
    writers.gguf_target(tmp_path / "t.gguf", "qwen3", writers.target_tensors("qwen3"))
    other = ("--target", tmp_path / "t.gguf")
    status, _, err = command("convert", "draft", tmp_path / "e.gguf", "--format", "gguf", *other)
    assert (
        status == 2
        and "its hidden size is 32, this target's is 64" in err
        and not (tmp_path / "e.gguf").exists()
    )


def test_overrides_are_written(command, tmp_path: Path) -> None:
    flags = ("--format", "gguf", "--rope-theta", "5e5", "--draft-causal", "all")
    assert command("convert", "draft", tmp_path / "d.gguf", *flags)[0] == 0
    found = pair.draft_config(sources.find(str(tmp_path / "d.gguf")))
    assert found.rope.theta == 5e5 and found.causal == (True,)


def test_a_gguf_draft_decodes_like_its_folder(command, tmp_path: Path) -> None:
    command("convert", "draft", tmp_path / "d.gguf", "--format", "gguf")
    flags = ("--target", "target", "--prompt", "hi", "--max-new-tokens", "8", "--json")
    answers = [
        json.loads(command("generate", *flags, "--draft", draft)[1])
        for draft in ("draft", tmp_path / "d.gguf")
    ]
    for key in ("tokens", "committed", "rounds"):
        assert answers[0][key] == answers[1][key]


def test_the_target_s_tokenizer_goes_into_the_file(command, tmp_path: Path) -> None:
    """From a GGUF target; inspect compares it, and the folder's differs in one token (byte 0 is '!!')."""
    target = tmp_path / "target.gguf"
    config = pair.target_config(sources.find("target"))
    params = pair.target_params(sources.find("target"), config, np.dtype(np.float32))
    characters = folders.bytes_in_text()
    words = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": ["!!", *(characters[i] for i in range(1, 256)), *folders.SPECIAL.values()],
        "tokenizer.ggml.token_type": np.array([1] * 256 + [3] * 4, np.int32),
        "tokenizer.ggml.merges": ["! !"],
        "tokenizer.ggml.eos_token_id": folders.IM_END,
    }
    gguf_export.save_target(target, config, params, "F32", words)

    draft = tmp_path / "d.gguf"
    status, out, _ = command("convert", "draft", draft, "--format", "gguf", "--target", target)
    assert status == 0 and "note" not in out
    fields = gguf.GGUFReader(draft).fields
    assert fields["tokenizer.ggml.tokens"].contents() == words["tokenizer.ggml.tokens"]
    assert fields["tokenizer.ggml.mask_token_id"].contents() == folders.MASK
    status, out, err = command("inspect", draft, "--target", target)
    assert status == 0 and err == "" and "260 tokens, the target's" in out
    status, out, err = command("inspect", draft, "--target", "target")
    assert status == 2 and "its token 0 is '!!', this target's is" in err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("draft", "draft", "--format", "hf"), "is the source: name another place"),
        (("draft", "target", "--format", "gguf"), "target: is a folder: a GGUF model is one file"),
        (("draft", "x.gguf", "--format", "hf"), "--format hf makes a folder"),
        (("draft", "x", "--format", "hf", "--type", "Q8_0"), "--type Q8_0 is one of GGUF"),
        (("target", "x.gguf", "--format", "gguf-luce"), "is a target: --format gguf-luce is of drafts"),
        (("target", "x.gguf", "--format", "gguf", "--rope-theta", "1e4"), "are of drafts"),
        (("draft", "x.gguf", "--format", "gguf", "--rope-theta", "-1"), "--rope-theta is -1.0"),
        (("nowhere", "x.gguf", "--format", "gguf"), "no short name"),
        (("draft", "x.gguf", "--format", "onnx"), "onnx"),
    ],
)
def test_what_cannot_be_converted(command, models: Path, flags: tuple[str, ...], says: str) -> None:
    status, out, err = command("convert", *flags)
    assert status == 2 and out == "" and says in err and err.count("\n") == 1
    assert not (models / "x.gguf").exists() and not (models / "x").exists()


def test_only_a_model_of_the_same_role_is_replaced(command, tmp_path: Path) -> None:
    for place, form in ((tmp_path / "d.gguf", "gguf"), (tmp_path / "d", "hf")):
        for _ in range(2):
            assert command("convert", "draft", place, "--format", form)[0] == 0
        status, _, err = command("convert", "target", place, "--format", form)
        assert status == 2 and "exists, and is no target that could be replaced" in err
    (tmp_path / "notes.txt").write_text("mine")
    status, _, err = command("convert", "draft", tmp_path / "notes.txt", "--format", "gguf")
    assert status == 2 and "is no draft that could be replaced" in err
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_folder_of_other_files_is_left_alone(command, tmp_path: Path) -> None:
    place = tmp_path / "mine"
    place.mkdir()
    (place / HF).write_text("mine")
    code, _, error = command("convert", "draft", place, "--format", "hf")
    assert code == 2 and "exists, and is no draft that could be replaced" in error
    assert (place / HF).read_text() == "mine"
    code, _, error = command("convert", "draft", place / HF / "below", "--format", "hf")
    assert code == 2 and "lies below a file" in error


def test_a_target_is_converted_too(command, tmp_path: Path) -> None:
    status, out, _ = command("convert", "target", tmp_path / "t.gguf", "--format", "gguf", "--type", "F32")
    assert status == 0 and "a target (GGUF, llama), F32, " in out and "no tokenizer" in out
    status, out, _ = command("convert", tmp_path / "t.gguf", tmp_path / "t", "--format", "hf")
    assert status == 0 and "a target (Hugging Face folder), F32, " in out
    before, after = (pair.target_config(sources.find(str(place))) for place in ("target", tmp_path / "t"))
    assert before == after
    folders.write_tokenizer(tmp_path / "t")
    flags = ("--prompt", "hi", "--max-new-tokens", "4", "--json")
    answers = [json.loads(command("generate", "--target", t, *flags)[1]) for t in ("target", tmp_path / "t")]
    assert answers[0]["tokens"] == answers[1]["tokens"]


# --- inspect of GGUF drafts -------------------------------------------------------------------------------


@pytest.mark.parametrize("family", draft_files.FAMILIES)
def test_inspect_names_the_family_and_the_schema(command, tmp_path: Path, family: str) -> None:
    path = draft_files.write(tmp_path / "d.gguf", family)
    status, out, err = command("inspect", path)
    names = {
        "upstream": "llama.cpp)",
        "pre-merge": "before the merge",
        "luce": "Luce",
        "community": "community",
    }
    assert status == 0 and err == "" and ": a draft (GGUF file)" in out and names[family] in out
    for key, value in draft_files.metadata(family).items():
        if key != "general.architecture":
            assert f"{key} = {value}" in out, key
    assert "does not say its target's depth" in out and "name the target with --target" in out


def test_inspect_checks_a_pair(command, tmp_path: Path) -> None:
    """Everything that does not fit is listed; exit status 2."""
    command("convert", "draft", tmp_path / "d.gguf", "--format", "gguf")
    status, out, err = command("inspect", tmp_path / "d.gguf", "--target", "target")
    assert status == 0 and err == "" and "the target's hidden size, vocabulary and depth" in out
    assert "none in the file: the target's is used" in out
    writers.gguf_target(tmp_path / "t.gguf", "qwen3", writers.target_tensors("qwen3"))
    status, out, err = command("inspect", tmp_path / "d.gguf", "--target", tmp_path / "t.gguf")
    assert status == 2
    for part in ("its hidden size is 32, this target's is 64", "its vocabulary (embedding rows) is 260"):
        assert part in out and part in err


def test_inspect_lists_what_is_wrong_and_still_shows_the_schema(command, tmp_path: Path) -> None:
    keys = {"A.attention.head_count": None, "A.block_size": 1, "A.target_layers": None}
    path = draft_files.write(tmp_path / "d.gguf", "upstream", keys=keys)
    status, out, err = command("inspect", path)
    assert status == 2 and "dflash.block_count = 2" in out and err.count("\n") == 1
    assert "attention.head_count is missing; dflash.target_layers is missing" in err
    path.write_bytes(path.read_bytes()[:-100])
    status, _, err = command("inspect", path)
    assert status == 2 and "truncated" in err


def test_inspect_without_a_target_still_checks_the_tensors(command, tmp_path: Path) -> None:
    path = draft_files.write(tmp_path / "d.gguf", "upstream", extra={"blk.1.attn_q_norm.weight": None})
    status, out, _ = command("inspect", path)
    assert status == 2 and "missing blk.1.attn_q_norm.weight [32]" in out
