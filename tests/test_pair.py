"""A target and a draft become a checked pair, from every kind of file. Tiny models, no network."""

from __future__ import annotations

import logging
from pathlib import Path

import draft_files
import folders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import writers

from dflash_jax import decode, pair, shortnames, sources, testing
from dflash_jax.config import ConfigError
from dflash_jax.pair import Pair
from dflash_jax.policy import Fixed
from dflash_jax.state import Options


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    folders.target(root / "target")
    folders.draft(root / "draft")
    return root


def load(models: Path, **how) -> Pair:
    return pair.load(str(models / "target"), str(models / "draft"), **how)


def test_a_pair_decodes(models: Path) -> None:
    loaded = load(models)
    assert loaded.draft is not None
    assert loaded.dtype == ("float32" if loaded.device.platform == "cpu" else "bfloat16")
    assert loaded.target.stop_ids == (folders.IM_END,)
    assert (loaded.target.source, loaded.draft.source) == (str(models / "target"), str(models / "draft"))
    how = {"max_new_tokens": 6, "stop_ids": loaded.target.stop_ids}
    fast = decode.complete(loaded.models, [[1, 2, 3]], Options(Fixed(folders.BLOCK)), **how)
    slow = decode.complete(loaded.with_draft(None).models, [[1, 2, 3]], Options(Fixed(1)), **how)
    assert fast.tokens == slow.tokens


def test_without_a_draft_it_is_autoregressive(models: Path) -> None:
    for draft in (None, "none"):
        loaded = pair.load(str(models / "target"), draft)
        assert loaded.draft is None and loaded.models.draft is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_dtype_on_one_device(models: Path, dtype: str) -> None:
    loaded = load(models, dtype=dtype, device="cpu:1")
    assert loaded.device == jax.devices("cpu")[1]
    for leaf in jax.tree.leaves((loaded.models.target_params, loaded.models.draft_params)):
        assert leaf.dtype == jnp.dtype(dtype) and leaf.devices() == {loaded.device}


def test_bfloat16_on_a_cpu_is_said_to_be_slow(models: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(models, dtype="bfloat16", device="cpu")
    assert "bfloat16 on a CPU is about ten times slower" in caplog.text


def test_a_gguf_target(tmp_path: Path) -> None:
    """writers.gguf_target leaves the tokenizer's scores out, so only the config is read here; the real
    file is loaded by the tests marked `model`."""
    tensors = writers.target_tensors("qwen3")
    writers.gguf_target(tmp_path / "model.gguf", "qwen3", tensors)
    source = sources.find(str(tmp_path / "model.gguf"))
    assert pair.target_config(source).family == "qwen3"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_size": 64}, "its hidden size is 64, this target's is 32"),
        ({"vocab_size": 300}, r"its vocabulary \(embedding rows\) is 300, this target's is 260"),
        ({"num_target_layers": 9}, "its depth is 9, this target's is 2"),
        ({"architectures": ["DFlash2DraftModel"]}, "this is a DFlash 2 draft"),
        ({"architectures": ["LlamaForCausalLM"], "dflash_config": None}, "not a DFlash draft"),
    ],
    ids=str,
)
def test_a_draft_that_does_not_fit_costs_no_weights(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict, says: str
) -> None:
    folders.draft(tmp_path / "draft", **changes)
    monkeypatch.setattr(pair.hf, "load_target", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(ConfigError, match=says):
        pair.load(str(models / "target"), str(tmp_path / "draft"))


def test_a_gguf_draft_is_completed_by_its_target_and_checked_before_weights(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair.hf, "load_target", lambda *_: pytest.fail("weights were read"))
    draft_files.write(tmp_path / "draft.gguf", "upstream", keys={"A.target_layers": [1, 2, 2]})
    with pytest.raises(ConfigError, match=r"its hidden size is 64, this target's is 32$"):
        pair.load(str(models / "target"), str(tmp_path / "draft.gguf"))


def test_a_block_size_is_checked_before_weights(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair.hf, "load_target", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(ConfigError, match="block size 9 cannot be used"):
        load(models, block_size=9)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"dtype": "int8"}, "dtype 'int8' is not supported: one of float32, bfloat16"),
        ({"device": "abacus"}, "device 'abacus' does not exist here: JAX sees cpu:0"),
        ({"device": "cpu:99"}, "device 'cpu:99' does not exist here"),
        ({"device": "cpu:x"}, "device 'cpu:x' does not exist here"),
    ],
    ids=str,
)
def test_choices_that_do_not_exist(models: Path, how: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load(models, **how)


def test_a_draft_chooses_among_all_or_few(models: Path) -> None:
    loaded = load(models, draft_vocabulary=7)
    head = loaded.target.params["lm_head"]["weight"]
    np.testing.assert_array_equal(loaded.models.draft_head, head[:7])
    assert loaded.models is loaded.models, "or the rows would be copied for every request"
    assert loaded.with_draft(loaded.draft).models.draft_head is None
    for every in (None, 0, head.shape[0]):
        assert load(models, draft_vocabulary=every).models.draft_head is None
    for wrong in (1, -3, head.shape[0] + 1):
        with pytest.raises(
            ConfigError, match=f"draft_vocabulary is {wrong}: it must be 2 to {head.shape[0]} "
        ):
            load(models, draft_vocabulary=wrong)
    with pytest.raises(ConfigError, match="draft_vocabulary 7 needs a draft, and there is none"):
        pair.load(str(models / "target"), "none", draft_vocabulary=7)


def test_roles_are_not_mixed_up(models: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this is a DFlash draft, not a target: pass it as the draft"):
        pair.load(str(models / "draft"))
    with pytest.raises(ConfigError, match="LlamaForCausalLM, not a DFlash draft"):
        pair.load(str(models / "target"), str(models / "target"))
    writers.gguf_target(tmp_path / "target.gguf", "qwen3", writers.target_tensors("qwen3"))
    with pytest.raises(ConfigError, match=r"general\.architecture is 'qwen3': drafts can be dflash"):
        pair.load(str(models / "target"), str(tmp_path / "target.gguf"))
    draft_files.write(tmp_path / "draft.gguf", "upstream")
    with pytest.raises(ConfigError, match=r"this is a DFlash draft .* pass it as the draft"):
        pair.load(str(tmp_path / "draft.gguf"))


def test_a_short_name_brings_its_draft_and_settings(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = models / "configs"
    configs.mkdir()
    (configs / "tiny.toml").write_text(
        '[target]\npath = "target"\n[draft]\npath = "draft"\n[generation]\nblock_size = 3\ndraft_vocabulary = 9\n'
    )
    monkeypatch.setattr(shortnames, "CONFIGS", configs)
    monkeypatch.setattr(shortnames, "ROOT", models)
    loaded = pair.load("tiny")
    assert loaded.draft is not None and loaded.draft.source == "tiny (shipped draft)"
    assert loaded.generation.block_size == 3 and loaded.draft_vocabulary == 9
    assert pair.load("tiny", draft_vocabulary=0).draft_vocabulary is None, "flags win"
    # settings belong to the shipped draft: they say nothing about another one
    other = pair.load("tiny", str(models / "draft"))
    assert other.generation.block_size is None and other.draft_vocabulary is None
    assert pair.load("tiny", "none").draft is None


def test_a_draft_of_chance_is_the_same_every_time(models: Path) -> None:
    target = load(models).target
    one, two = pair.random_draft(target), pair.random_draft(target)
    assert not one.trained and one.config.taps == (0, 1) and one.config.block_size == 8
    jax.tree.map(np.testing.assert_array_equal, one.params, two.params)
    assert np.all(np.asarray(one.params["layers_0"]["self_attn"]["q_norm"]["weight"]) == 1)
    assert 0.01 < np.asarray(one.params["fc"]["weight"]).std() < 0.03
    shapes = jax.tree.map(lambda leaf: leaf.shape, one.params)
    assert shapes == jax.tree.map(lambda leaf: leaf.shape, pair.drafts.abstract_params(one.config))


def test_memory_is_said_before_it_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    device = jax.devices()[0]
    with caplog.at_level(logging.WARNING):
        pair.say_memory("small things", 2**30, device)
        assert not caplog.text
        pair.say_memory("the weights of x", 3 * 2**30, device)
    assert "the weights of x take 3.0 GiB on cpu:0" in caplog.text


def test_moving_leaves_no_second_copy() -> None:
    host = {"a": {"b": np.ones(3, np.float32)}}
    moved = pair.to_device(host, jax.devices()[0])
    assert host == {"a": {}} or host == {}
    assert isinstance(moved["a"]["b"], jax.Array)


@pytest.mark.model
def test_smollm2_loads(smollm2_gguf: Path) -> None:
    loaded = pair.load(str(smollm2_gguf))
    assert loaded.target.config.num_layers == 30 and loaded.target.stop_ids == (2,)
    assert pair.random_draft(loaded.target).config.taps == (1, 8, 14, 20, 27)


@pytest.mark.parametrize(("family", "size"), [("qwen3", 48), ("qwen3_moe", 48), ("qwen3_5_moe", 3 * 32)])
def test_a_draft_has_an_mlp_of_its_own_where_the_target_has_none(family: str, size: int) -> None:
    made = pair.draft_shape(testing.target_config(family), num_layers=1, block_size=4, mask_token_id=0)
    assert made.intermediate_size == size
