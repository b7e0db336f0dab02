"""Drafts in Hugging Face folders: every schema reads, what does not fit is one error, what is written reads
back."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import writers
from writers import BFLOAT16, assert_trees_equal, write_config

from dflash_jax import drafts
from dflash_jax.config import (
    FULL,
    SLIDING,
    ConfigError,
    DraftConfig,
    RopeConfig,
    TargetConfig,
    Training,
    check_block_size,
    check_pair,
)
from dflash_jax.weights import hf
from dflash_jax.weights.tensors import flatten, nest


def draft_config(tmp_path: Path, schema: str = "nested", **changes: Any) -> DraftConfig:
    return hf.draft_config(write_config(tmp_path / "draft", writers.draft_json(schema, **changes)))


def target_config(tmp_path: Path, family: str, **changes: Any) -> TargetConfig:
    return hf.target_config(write_config(tmp_path / "target", writers.target_json(family, **changes)))


# --- draft configs (cases 25-28, 31) ------------------------------------------------------------------


@pytest.mark.parametrize("schema", ["legacy", "nested", "flat"])
def test_three_schemas_give_one_config(tmp_path: Path, schema: str) -> None:
    config = draft_config(tmp_path, schema)
    assert (config.block_size, config.mask_token_id, config.taps) == (writers.BLOCK, 3, writers.TAPS)
    assert config.rope == RopeConfig(1e6)
    assert config.causal == (False,) * writers.LAYERS
    assert config.layer_types == (FULL,) * writers.LAYERS
    assert (config.hidden_size, config.head_dim, config.num_target_layers) == (64, 32, writers.DEPTH)
    assert len(config.taps) != config.num_layers
    assert config.training == Training()


LINEAR = {"type": "linear", "factor": 2}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_theta": 5e5}, RopeConfig(5e5)),
        ({"rope_parameters": {"rope_theta": 5e5}}, RopeConfig(5e5)),
        ({"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 1e4}, RopeConfig(5e5)),
        ({"rope_scaling": LINEAR, "rope_theta": 1e4}, RopeConfig(1e4, "linear", 2.0)),
        (
            {"rope_scaling": LINEAR | {"rope_theta": 7e4}, "rope_theta": 1e4},
            RopeConfig(7e4, "linear", 2.0),
        ),
        # a non-empty rope_scaling replaces rope_parameters altogether, an empty one does not
        (
            {"rope_scaling": YARN, "rope_parameters": {"rope_theta": 5e5}, "rope_theta": 1e4},
            RopeConfig(1e4, "yarn", 4.0, 512),
        ),
        ({"rope_scaling": {}, "rope_parameters": {"rope_theta": 5e5}}, RopeConfig(5e5)),
        (
            {
                "rope_parameters": YARN
                | {"rope_theta": 1e4, "attention_factor": 1.5}
                | {"beta_fast": 16, "beta_slow": 2, "truncate": False}
            },
            RopeConfig(
                1e4, "yarn", 4.0, 512, attention_factor=1.5, beta_fast=16.0, beta_slow=2.0, truncate=False
            ),
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0, "mscale": 1.0}},
            RopeConfig(1e4, "yarn", 4.0, 4096, mscale=1.0),
        ),
        (
            {
                "rope_theta": 5e5,
                "rope_scaling": {
                    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                },
            },
            RopeConfig(5e5, "llama3", 8.0, 8192),
        ),
        (
            {"rope_parameters": {FULL: {"rope_theta": 3e4}, SLIDING: {"rope_theta": 3e4}}},
            RopeConfig(3e4),
        ),
    ],
)  # fmt: skip
def test_rope_is_found_where_transformers_finds_it(
    tmp_path: Path, changes: dict, expected: RopeConfig
) -> None:
    changes = {"rope_theta": None} | changes
    if "rope_parameters" not in changes:
        changes["rope_parameters"] = None
    config = writers.draft_json("nested", rope_parameters=None) | {
        key: value for key, value in changes.items() if value is not None
    }
    assert hf.draft_config(write_config(tmp_path / "draft", config)).rope == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": None}, "rope_theta is missing"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope type 'longrope' is not supported"),
        ({"rope_parameters": {"rope_type": "yarn"}}, r"rope_parameters\.factor is missing"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_theta": -1.0}}, "must be positive"),
        ({"rope_parameters": {"rope_theta": "1e6"}}, "must be a number"),
        (
            {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_theta is missing",
        ),
        ({"dflash_config": {"block_size": None}}, "block_size is missing"),
        ({"dflash_config": {"block_size": 1}}, "at least 2"),
        ({"dflash_config": {"mask_token_id": None}}, "mask_token_id is missing"),
        ({"dflash_config": {"mask_token_id": writers.VOCAB}}, "outside the 80 embedding rows"),
        ({"dflash_config": {"mask_token_id": -1}}, "mask_token_id is -1"),
        ({"dflash_config": {"mask_token_id": True}}, "must be an integer"),
        ({"dflash_config": {"target_layer_ids": [1, writers.DEPTH]}}, "taps target layer 7, but"),
        ({"dflash_config": {"target_layer_ids": []}}, "names no target layers"),
        ({"dflash_config": {"target_layer_ids": ["1"]}}, "must be a list of integers"),
        ({"num_target_layers": None}, "num_target_layers is missing"),
        ({"head_dim": None}, "head_dim is missing"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"num_hidden_layers": 2**31 - 1}, "must be between 0 and 4096"),
        ({"hidden_size": 2**40}, "must be between"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"layer_types": [FULL]}, "names 1 layer types for 2 layers"),
        ({"layer_types": [FULL, "linear_attention"]}, "'linear_attention' is not supported"),
        ({"layer_types": [SLIDING, FULL], "use_sliding_window": True}, "sliding_window is missing"),
        ({"is_causal": "no"}, "is_causal is 'no'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rms_norm_eps": float("nan")}, "finite"),
        ({"dflash_config": {"training": [1]}}, r"dflash_config\.training is \[1\]"),
    ],
)
def test_a_bad_draft_config_is_one_clear_error(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        draft_config(tmp_path, **changes)
    assert str(error.value).startswith(str(tmp_path / "draft" / "config.json"))
    assert str(error.value).count("config.json") == 1


def test_nested_block_size_wins_over_the_top_level(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="block_size is 4 in dflash_config and 16 at the top"):
        assert draft_config(tmp_path, block_size=16).block_size == 4
    assert draft_config(tmp_path, block_size=4).block_size == 4


def test_head_dim_is_what_the_file_says(tmp_path: Path) -> None:
    config = draft_config(
        tmp_path, hidden_size=5120, num_attention_heads=32, num_key_value_heads=8, head_dim=128
    )
    assert config.head_dim == 128
    shapes = flatten(drafts.abstract_params(config))
    assert shapes["layers_0.self_attn.q_proj.weight"].shape == (4096, 5120)
    assert shapes["fc.weight"].shape == (5120, 3 * 5120)


def test_absent_taps_are_the_reference_choice_and_said_so(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="names no target_layer_ids"):
        config = draft_config(
            tmp_path, num_target_layers=36, num_hidden_layers=5, dflash_config={"target_layer_ids": None}
        )
    assert config.taps == (1, 9, 17, 25, 33)


# --- causality and windows (case 29) ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("is_causal", "expected"), [(None, (True, False)), (False, (False, False)), (True, (True, True))]
)
def test_causality_is_one_flag_or_follows_the_layer_types(
    tmp_path: Path, is_causal: bool | None, expected: tuple
) -> None:
    config = draft_config(
        tmp_path, layer_types=[SLIDING, FULL], use_sliding_window=True, sliding_window=8, is_causal=is_causal
    )
    assert config.causal == expected
    assert (config.window(0), config.window(1)) == (8, None)


def test_is_causal_counts_at_the_top_level_only(tmp_path: Path) -> None:
    assert draft_config(tmp_path, dflash_config={"is_causal": True}).causal == (False, False)


@pytest.mark.parametrize("flag", [None, False])
def test_a_window_counts_only_with_its_flag(tmp_path: Path, flag: bool | None) -> None:
    with pytest.warns(UserWarning, match="use_sliding_window"):
        config = draft_config(
            tmp_path, layer_types=[SLIDING, FULL], sliding_window=8, use_sliding_window=flag
        )
    assert (config.window(0), config.causal) == (None, (True, False))


def test_the_flat_assistant_is_windowed_and_never_causal(tmp_path: Path) -> None:
    config = draft_config(
        tmp_path,
        "flat",
        architectures=["MuseGlimmerAssistantModel"],
        model_type="muse_glimmer_assistant",
        layer_types=[SLIDING, SLIDING],
        sliding_window=8,
    )
    assert (config.window(0), config.causal) == (8, (False, False))


# --- other drafts, pairs, block sizes (cases 30, 33, 34) ----------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "a DFlash 2 draft"),
        ({"dflash_config": {"selector_rank": 64}}, "a DFlash 2 draft"),
        ({"architectures": ["Qwen3DSparkModel"]}, "a DSpark draft"),
        ({"dflash_config": {"markov_rank": 8}}, "a DSpark draft"),
        ({"speculators_model_type": "dflash"}, "a speculators checkpoint"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "this is Qwen3ForCausalLM, not a DFlash draft"),
        ({"architectures": None}, "architectures is missing"),
    ],
)
def test_other_drafts_are_refused_by_name(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        draft_config(tmp_path, **changes)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ("layers.0.attention_conv.base_kernel", "a DFlash 2 draft"),
        ("candidate_selector.predecessor_codebook", "a DFlash 2 draft"),
        ("markov_head.markov_w1.weight", "a DSpark draft"),
        ("d2t", "a speculators checkpoint"),
    ],
)
def test_tensors_of_other_drafts_are_refused_by_name(tmp_path: Path, tensor: str, message: str) -> None:
    tensors = writers.draft_tensors()
    folder = writers.hf_folder(
        tmp_path / "d", writers.draft_json(), tensors | {tensor: np.ones(2, np.float32)}
    )
    with pytest.raises(ConfigError, match=message):
        hf.load_draft(folder, hf.draft_config(folder), writers.expected_tree(tensors), np.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 128}, "hidden size"),
        ({"vocab_size": 96}, "vocabulary"),
        ({"num_hidden_layers": 8}, "depth"),
    ],
)
def test_a_draft_for_another_target_is_refused(tmp_path: Path, changes: dict, message: str) -> None:
    draft = draft_config(tmp_path)
    check_pair(target_config(tmp_path, "qwen3", num_hidden_layers=writers.DEPTH), draft)
    target = target_config(tmp_path, "qwen3", **{"num_hidden_layers": writers.DEPTH} | changes)
    with pytest.raises(ConfigError, match=message):
        check_pair(target, draft)


def test_a_block_may_be_smaller_than_trained_not_larger(tmp_path: Path) -> None:
    draft = draft_config(tmp_path)
    check_block_size(draft, draft.block_size)
    check_block_size(draft, 2)
    for size in (draft.block_size + 1, 1):
        with pytest.raises(ConfigError, match="trained with 4"):
            check_block_size(draft, size)


# --- draft weights ------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "model."])
def test_draft_weights_load_with_and_without_a_prefix(tmp_path: Path, prefix: str) -> None:
    tensors = writers.draft_tensors()
    folder = writers.hf_folder(
        tmp_path / "draft", writers.draft_json(), {prefix + name: value for name, value in tensors.items()}
    )
    config = hf.draft_config(folder)
    loaded = hf.load_draft(folder, config, drafts.abstract_params(config), np.float32)
    assert_trees_equal(loaded, writers.expected_tree(tensors))


def test_the_flat_schema_names_its_fusion_differently(tmp_path: Path) -> None:
    tensors = writers.draft_tensors()
    flat = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    folder = writers.hf_folder(
        tmp_path / "draft",
        writers.draft_json("flat"),
        {flat.get(name, name): v for name, v in tensors.items()},
    )
    expected = writers.expected_tree(tensors)
    assert_trees_equal(hf.load_draft(folder, hf.draft_config(folder), expected, np.float32), expected)


def test_one_tensor_under_two_names_is_an_error(tmp_path: Path) -> None:
    tensors = writers.draft_tensors()
    twice = tensors | {"model.norm.weight": tensors["norm.weight"]}
    folder = writers.hf_folder(tmp_path / "draft", writers.draft_json(), twice)
    with pytest.raises(ConfigError, match=r"norm\.weight and model\.norm\.weight are both"):
        hf.load_draft(folder, hf.draft_config(folder), writers.expected_tree(tensors), np.float32)


def test_fc_that_disagrees_with_the_taps_names_both_numbers(tmp_path: Path) -> None:
    folder = writers.hf_folder(tmp_path / "draft", writers.draft_json(), writers.draft_tensors(taps=5))
    config = hf.draft_config(folder)
    with pytest.raises(ConfigError, match=r"takes 320 features, but 3 taps .* of 64 give 192"):
        hf.load_draft(folder, config, drafts.abstract_params(config), np.float32)


def test_a_draft_with_a_head_of_its_own_is_refused(tmp_path: Path) -> None:
    tensors = writers.draft_tensors()
    head = {"lm_head.weight": np.ones((writers.VOCAB, writers.HIDDEN), np.float32)}
    folder = writers.hf_folder(tmp_path / "draft", writers.draft_json(), tensors | head)
    with pytest.raises(ConfigError, match=r"unknown lm_head\.weight \[80, 64\]"):
        hf.load_draft(folder, hf.draft_config(folder), writers.expected_tree(tensors), np.float32)


def test_saved_draft_reads_back_equal(tmp_path: Path) -> None:
    config = draft_config(
        tmp_path,
        layer_types=[SLIDING, FULL],
        use_sliding_window=True,
        sliding_window=8,
        output_multiplier=0.5,
        final_logit_softcapping=30.0,
        input_embedding_scale=8.0,
        rope_parameters=YARN | {"attention_factor": 1.2},
        dflash_config={
            "training": {"loss_decay": 7.0, "num_anchors": 512, "target_name": "tiny", "target_hash": "ab"}
        },
    )
    params = writers.expected_tree(writers.draft_tensors())
    for dtype in (np.dtype(np.float32), BFLOAT16):
        hf.save_draft(tmp_path / "saved", config, params, dtype)
        assert hf.draft_config(tmp_path / "saved") == config
        loaded = hf.load_draft(tmp_path / "saved", config, drafts.abstract_params(config), dtype)
        assert_trees_equal(loaded, params, dtype)
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    written = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert written["dflash_config"]["training"]["target_hash"] == "ab"
    assert "is_causal" not in written  # layers differ: the per-layer default says it
    assert written["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("causal", [True, False])
def test_export_stamps_causality_that_one_flag_can_say(tmp_path: Path, causal: bool) -> None:
    config = dataclasses.replace(draft_config(tmp_path), causal=(causal, causal))
    hf.save_draft(tmp_path / "saved", config, writers.expected_tree(writers.draft_tensors()), np.float32)
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["is_causal"] is causal
    assert hf.draft_config(tmp_path / "saved") == config


def test_what_a_reader_would_refuse_is_not_written(tmp_path: Path) -> None:
    config = draft_config(tmp_path)
    good = flatten(writers.expected_tree(writers.draft_tensors()))
    for bad in (
        {path: value for path, value in good.items() if not path.startswith("layers_1.")},
        good | {"fc.weight": good["fc.weight"][:, :64]},
    ):
        with pytest.raises(ConfigError):
            hf.save_draft(tmp_path / "saved", config, nest(bad), np.float32)
    with pytest.raises(ConfigError, match="causality differs"):
        hf.save_draft(
            tmp_path / "saved", dataclasses.replace(config, causal=(True, False)), nest(good), np.float32
        )
    assert not (tmp_path / "saved").exists()


def test_an_interrupted_save_leaves_no_mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = draft_config(tmp_path)
    params = writers.expected_tree(writers.draft_tensors())
    hf.save_draft(tmp_path / "saved", config, params, np.float32)

    def fail(*args: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        hf.save_draft(tmp_path / "saved", dataclasses.replace(config, block_size=8), params, np.float32)
    # the old weights without a config, and no temporary file
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["model.safetensors"]
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        hf.draft_config(tmp_path / "saved")


def test_the_official_library_reads_what_we_write(tmp_path: Path) -> None:
    tensors = writers.draft_tensors()
    config = draft_config(tmp_path)
    hf.save_draft(tmp_path / "saved", config, writers.expected_tree(tensors), np.float32)
    with safetensors.safe_open(tmp_path / "saved" / "model.safetensors", framework="np") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(tensors)
        for name, value in tensors.items():
            np.testing.assert_array_equal(file.get_tensor(name), value)
