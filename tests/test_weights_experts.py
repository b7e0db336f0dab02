"""Experts in Hugging Face folders: one by one or fused, read to the same parameters; configs of MoE targets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from dflash_jax import targets, testing
from dflash_jax.config import FULL, SLIDING, ConfigError, MoeConfig, TargetConfig
from dflash_jax.weights import hf, safetensors_file

FLOAT32 = np.dtype(np.float32)
FAMILIES = ("qwen3_moe", "qwen3_5_moe")
Tensors = dict[str, np.ndarray]


def saved(folder: Path, family: str, **changes: Any) -> tuple[TargetConfig, dict[str, Any]]:
    config = testing.target_config(family, **changes)
    params = jax.tree.map(np.asarray, testing.random_params(targets.abstract_params(config)))
    hf.save_target(folder, config, params, FLOAT32)
    return config, params


def tensors(folder: Path) -> Tensors:
    found = safetensors_file.read_file(folder / safetensors_file.SINGLE)
    return {name: t.rows(0, len(t.raw)).reshape(t.shape) for name, t in found.items()}


def rewrite(folder: Path, values: Tensors) -> None:
    safetensors_file.write_file(folder / safetensors_file.SINGLE, values, {"format": "pt"})


def edit(folder: Path, **changes: Any) -> None:
    """config.json with fields changed; None takes one away."""
    path = folder / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def fused(values: Tensors, layer: int) -> Tensors:
    """The experts of a layer in two tensors, as transformers 5 holds them."""
    prefix = f"model.layers.{layer}.mlp.experts."
    kept = {name: value for name, value in values.items() if not name.startswith(prefix)}
    count = len([name for name in values if name.startswith(prefix)]) // 3
    one = [
        {kind: values[f"{prefix}{e}.{kind}_proj.weight"] for kind in ("gate", "up", "down")}
        for e in range(count)
    ]
    kept[prefix + "gate_up_proj"] = np.stack([np.concatenate([e["gate"], e["up"]]) for e in one])
    kept[prefix + "down_proj"] = np.stack([e["down"] for e in one])
    return kept


def loaded(folder: Path) -> dict[str, Any]:
    config = hf.target_config(folder)
    return hf.load_target(folder, config, targets.abstract_params(config), FLOAT32)


def same(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_and_read_back(family: str, tmp_path: Path) -> None:
    config, params = saved(tmp_path, family)
    assert hf.target_config(tmp_path) == config
    same(loaded(tmp_path), params)


def test_experts_are_written_as_they_are_published(tmp_path: Path) -> None:
    """Qwen3-MoE one by one, Qwen3.5-MoE fused: what other programs read."""
    (tmp_path / "a").mkdir()
    _, params = saved(tmp_path / "a", "qwen3_moe")
    alone = tensors(tmp_path / "a")
    gate_up = params["layers_1"]["mlp"]["experts"]["gate_up_proj"]
    half = gate_up.shape[1] // 2
    np.testing.assert_array_equal(alone["model.layers.1.mlp.experts.3.gate_proj.weight"], gate_up[3, :half])
    np.testing.assert_array_equal(alone["model.layers.1.mlp.experts.3.up_proj.weight"], gate_up[3, half:])
    assert not any(name.endswith("experts.gate_up_proj") for name in alone)
    _, params = saved(tmp_path / "b", "qwen3_5_moe")
    together = tensors(tmp_path / "b")["model.layers.1.mlp.experts.gate_up_proj"]
    np.testing.assert_array_equal(together, params["layers_1"]["mlp"]["experts"]["gate_up_proj"])


def test_both_forms_are_the_same_parameters(tmp_path: Path) -> None:
    """Also side by side, one layer fused and one not."""
    _, params = saved(tmp_path, "qwen3_moe", num_layers=3)
    values = tensors(tmp_path)
    for layers in ((1,), (1, 2)):
        changed = values
        for layer in layers:
            changed = fused(changed, layer)
        rewrite(tmp_path, changed)
        same(loaded(tmp_path), params)


def test_a_missing_and_a_misshapen_expert_are_named(tmp_path: Path) -> None:
    saved(tmp_path, "qwen3_moe")
    values = tensors(tmp_path)
    del values["model.layers.1.mlp.experts.2.up_proj.weight"]
    down = "model.layers.1.mlp.experts.4.down_proj.weight"
    values[down] = values[down][:, :-1]
    rewrite(tmp_path, values)
    with pytest.raises(ConfigError) as error:
        loaded(tmp_path)
    assert r"missing model.layers.1.mlp.experts.2.up_proj.weight [12, 32];" in str(error.value)
    assert f"{down} is [32, 11], expected [32, 12]" in str(error.value)
    assert str(error.value).count("experts") == 2
    config = hf.target_config(tmp_path)
    with pytest.raises(ConfigError, match=r"experts\.2\.up_proj"):
        hf.check_target(tmp_path, config, targets.abstract_params(config))


def test_absent_experts_are_missed_as_two_tensors(tmp_path: Path) -> None:
    """One line a layer, not one for each of its hundreds of experts."""
    saved(tmp_path, "qwen3_moe")
    values = {name: value for name, value in tensors(tmp_path).items() if ".experts." not in name}
    rewrite(tmp_path, values)
    with pytest.raises(ConfigError, match=r"missing model\.layers\.1\.mlp\.experts\.gate_up_proj") as error:
        loaded(tmp_path)
    assert str(error.value).count("missing") == 2


def test_one_expert_too_many_is_unknown(tmp_path: Path) -> None:
    saved(tmp_path, "qwen3_moe")
    values = tensors(tmp_path)
    values["model.layers.1.mlp.experts.5.up_proj.weight"] = values[
        "model.layers.1.mlp.experts.4.up_proj.weight"
    ]
    rewrite(tmp_path, values)
    with pytest.raises(ConfigError, match=r"unknown model.layers.1.mlp.experts.5.up_proj.weight"):
        loaded(tmp_path)


# --- configs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "routed"),
    [
        ({"mlp_only_layers": None, "decoder_sparse_step": None}, (True,) * 6),
        ({"mlp_only_layers": [], "decoder_sparse_step": 2}, (False, True) * 3),
        ({"mlp_only_layers": [1, 4], "decoder_sparse_step": 1}, (True, False, True, True, False, True)),
        ({"mlp_only_layers": [3], "decoder_sparse_step": 2}, (False, True, False, False, False, True)),
    ],
)
def test_which_layers_are_routed(changes: dict[str, Any], routed: tuple[bool, ...], tmp_path: Path) -> None:
    saved(tmp_path, "qwen3_moe", num_layers=6)
    edit(tmp_path, **changes)
    config = hf.target_config(tmp_path)
    assert config.moe is not None and config.moe.layers == routed


def test_defaults_and_other_names_of_qwen3_moe(tmp_path: Path) -> None:
    """By the class: weights are not normalised, head_dim is hidden / heads, and transformers 5 counts
    `num_local_experts`."""
    saved(tmp_path, "qwen3_moe")
    edit(tmp_path, norm_topk_prob=None, head_dim=None, num_experts=None, num_local_experts=7)
    config = hf.target_config(tmp_path)
    assert config.head_dim == 8
    assert config.moe == MoeConfig(7, 2, 12, (False, True), normalise=False)
    edit(tmp_path, norm_topk_prob=True)
    config = hf.target_config(tmp_path)
    assert config.moe is not None and config.moe.normalise


def test_a_window_of_qwen3_moe_is_that_of_all_layers(tmp_path: Path) -> None:
    slides = {"layer_types": (SLIDING, SLIDING), "sliding_window": 4}
    config, _ = saved(tmp_path, "qwen3_moe", **slides)
    assert hf.target_config(tmp_path) == config
    edit(tmp_path, layer_types=None)
    assert hf.target_config(tmp_path) == config
    edit(tmp_path, layer_types=[FULL, SLIDING])
    with pytest.raises(ConfigError, match="layer_types differs from the sliding_attention"):
        hf.target_config(tmp_path)
    edit(tmp_path, layer_types=None, use_sliding_window=False)
    assert hf.target_config(tmp_path).layer_types == (FULL, FULL)


def test_qwen3_5_moe_is_normalised_and_has_no_dense_layer(tmp_path: Path) -> None:
    saved(tmp_path, "qwen3_5_moe")
    edit(tmp_path, norm_topk_prob=False, mlp_only_layers=[0], intermediate_size=None)  # not of this class
    config = hf.target_config(tmp_path)
    assert config.moe == MoeConfig(5, 2, 12, (True,) * 4, 20)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("field", ["num_experts", "num_experts_per_tok", "moe_intermediate_size"])
def test_a_missing_field_is_named(family: str, field: str, tmp_path: Path) -> None:
    saved(tmp_path, family)
    edit(tmp_path, **{field: None})
    with pytest.raises(ConfigError, match=f"config.json: {field} is missing"):
        hf.target_config(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 6}, "6 experts per token of 5"),
        ({"num_experts": 0}, "experts is 0"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0: it must be positive"),
        ({"mlp_only_layers": [2]}, "mlp_only_layers names layer 2 of 2"),
    ],
)
def test_impossible_values(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    saved(tmp_path, "qwen3_moe")
    edit(tmp_path, **changes)
    with pytest.raises(ConfigError, match=message):
        hf.target_config(tmp_path)
