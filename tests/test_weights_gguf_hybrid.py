"""GGUF targets with gated delta layers and routed experts: every transform of the converter is undone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf as gguf_py
import hybrid_gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_weights_gguf import assert_only_config_errors

from dflash_jax import targets, testing
from dflash_jax.block import chain_block
from dflash_jax.cache import target_cache
from dflash_jax.config import FULL, RECURRENT, ConfigError, MoeConfig, RecurrentConfig, TargetConfig
from dflash_jax.targets import make_target
from dflash_jax.weights import gguf, hf
from dflash_jax.weights.tensors import flatten

# A quarter of a head that rotates, three value heads for each key head, all sizes different, rows that Q8_0
# can hold.
SHAPE = {"rotary_dim": 4, "recurrent": RecurrentConfig(key_heads=2, value_heads=6, key_dim=8, value_dim=16)}
INTERVALS = {  # layer types, and whether only flags can say them
    "every second": ((RECURRENT, FULL) * 2, False),
    "every fourth": ((RECURRENT,) * 3 + (FULL,), False),
    "no rule": ((FULL, RECURRENT, RECURRENT, FULL), True),
}
FAMILIES = tuple(hybrid_gguf.ARCHITECTURES)
# qwen3_moe has no recurrent layers to lay out
KINDS = [("qwen3_moe", "every second")] + [
    (family, layout) for family in ("qwen3_5", "qwen3_5_moe") for layout in INTERVALS
]


def config_of(family: str, layout: str = "every second", layers: int = 4, **changes: Any) -> TargetConfig:
    """What a file can say: every layer routed, weights normalised."""
    fields: dict[str, Any] = {"max_positions": 256, "intermediate_size": 64, "num_layers": layers}
    if family != "qwen3_moe":
        fields |= SHAPE | {"layer_types": INTERVALS[layout][0][:layers]}
    if family == "qwen3_5_moe":
        fields |= {"moe": MoeConfig(5, 2, 32, (True,) * layers, 96), "intermediate_size": 32}
    if family == "qwen3_moe":
        fields |= {"moe": MoeConfig(5, 2, 32, (True,) * layers)}
    return testing.target_config(family, **(fields | changes))


def params_of(config: TargetConfig, seed: int = 0) -> dict[str, Any]:
    abstract = targets.abstract_params(config)
    return jax.tree.map(np.asarray, testing.random_params(abstract, seed))


def logits(config: TargetConfig, params: dict[str, Any]) -> np.ndarray:
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, config.vocab_size, (1, 9)), jnp.int32)

    @jax.jit
    def forward(params: dict[str, Any]) -> jax.Array:
        cache = target_cache(config, 1, 16, jnp.float32)
        output = make_target(config).apply({"params": params}, chain_block(tokens), cache)
        return output.logits

    return np.asarray(forward(params))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("family", "layout"), KINDS)
def test_a_target_is_read_as_it_was(tmp_path: Path, family: str, layout: str, tied: bool) -> None:
    config = config_of(family, layout, tie_word_embeddings=tied)
    params = params_of(config)
    flags = INTERVALS[layout][1]
    # each option with one of the others, not all products
    path = hybrid_gguf.write(
        tmp_path / "t.gguf", config, params, fused=tied, flags=flags, further=int(layout == "every second")
    )
    assert gguf.target_config(path) == config
    assert gguf.target_config(path).hash() == config.hash()
    abstract = targets.abstract_params(config)
    gguf.check_target(path, config, abstract)
    loaded = gguf.load_target(path, config, abstract, np.float32)
    found, expected = flatten(loaded), flatten(params)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        # 1 + w and exp round: nothing else may differ
        np.testing.assert_allclose(found[name], value, rtol=0, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_gives_the_logits_of_its_model(tmp_path: Path, family: str) -> None:
    config = config_of(family, layers=2)
    params = params_of(config)
    path = hybrid_gguf.write(tmp_path / "t.gguf", config, params)
    loaded = gguf.load_target(path, config, targets.abstract_params(config), np.float32)
    np.testing.assert_allclose(logits(config, loaded), logits(config, params), atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_both_forms_of_a_model_have_one_config(tmp_path: Path, family: str) -> None:
    config = config_of(family)
    params = params_of(config)
    hf.save_target(tmp_path / "hf", config, params, np.float32)
    path = hybrid_gguf.write(tmp_path / "t.gguf", config, params)
    assert gguf.target_config(path) == hf.target_config(tmp_path / "hf") == config
    assert gguf.target_config(path).hash() == hf.target_config(tmp_path / "hf").hash()


@pytest.mark.parametrize("kind", ["Q8_0", "BF16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_quantised_rows_and_columns_keep_their_values(tmp_path: Path, family: str, kind: str) -> None:
    """The file quantises the tiled order: block by block along a row, so columns move only once decoded."""
    config = config_of(family)
    params = params_of(config)
    path = hybrid_gguf.write(tmp_path / "t.gguf", config, params, kind=kind)
    loaded = gguf.load_target(path, config, targets.abstract_params(config), np.float32)
    again = hybrid_gguf.write(tmp_path / "again.gguf", config, loaded)
    written, stored = (
        {tensor.name: tensor for tensor in gguf_py.GGUFReader(file).tensors} for file in (path, again)
    )
    assert written.keys() == stored.keys()
    for name, tensor in written.items():
        exact = gguf_py.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_allclose(stored[name].data, exact, rtol=1e-6, atol=2e-6, err_msg=name)


# --- metadata -----------------------------------------------------------------------------------------


def write(path: Path, family: str, **options: Any) -> TargetConfig:
    """A file of a model that has only its table: enough for a config."""
    config = config_of(family)
    table = {"embed_tokens": {"weight": np.ones((config.vocab_size, config.hidden_size), np.float32)}}
    # as many tensors as a file of so many blocks has at least
    more = {f"blk.{i}.filler.weight": np.ones(1, np.float32) for i in range(16)}
    changes = {"output.weight": np.ones(1, np.float32)} | more
    hybrid_gguf.write(path, config, table, changes=changes, **options)
    return config


def test_layer_types_by_default_flags_and_interval(tmp_path: Path) -> None:
    path = tmp_path / "t.gguf"
    eight = {"block_count": 8, "full_attention_interval": None}
    write(path, "qwen3_5", metadata=eight)
    assert gguf.target_config(path).layer_types == ((RECURRENT,) * 3 + (FULL,)) * 2
    write(path, "qwen3_5", metadata=eight | {"full_attention_interval": 3})
    assert gguf.target_config(path).layer_types == (RECURRENT, RECURRENT, FULL) * 2 + (RECURRENT,) * 2
    flags = [False, True, True, False, True, True, True, False]
    write(path, "qwen3_5", metadata=eight | {"attention.recurrent_layers": flags})
    kinds = tuple(RECURRENT if flag else FULL for flag in flags)
    assert gguf.target_config(path).layer_types == kinds
    further = {"nextn_predict_layers": 2, "attention.recurrent_layers": flags}
    write(path, "qwen3_5", metadata=eight | further)
    assert gguf.target_config(path).layer_types == kinds[:6]


def test_key_value_heads_may_be_told_by_layer(tmp_path: Path) -> None:
    config = write(tmp_path / "t.gguf", "qwen3_5", metadata={"attention.head_count_kv": [0, 2, 0, 2]})
    assert gguf.target_config(tmp_path / "t.gguf") == config


@pytest.mark.parametrize(
    ("family", "metadata", "message"),
    [
        ("qwen3_5", {"ssm.state_size": None}, r"qwen35\.ssm\.state_size is missing"),
        ("qwen3_5", {"ssm.inner_size": 97}, r"qwen35\.ssm\.inner_size is 97, not a multiple of 6"),
        ("qwen3_5", {"ssm.group_count": 4}, "6 value heads over 4 key heads"),
        ("qwen3_5", {"ssm.time_step_rank": 0}, "of 0 value heads"),
        ("qwen3_5", {"ssm.conv_kernel": 1}, "conv_width is 1"),
        ("qwen3_5", {"full_attention_interval": 0}, "full_attention_interval is 0"),
        ("qwen3_5", {"full_attention_interval": 9}, "no attention layer"),
        ("qwen3_5", {"attention.recurrent_layers": [True] * 3}, "a flag for each of 4 layers"),
        ("qwen3_5", {"attention.recurrent_layers": [1, 0, 1, 0]}, "a flag for each of 4 layers"),
        ("qwen3_5", {"attention.head_count_kv": [0, 2, 0, 4]}, r"head_count_kv names \[2, 4\]"),
        ("qwen3_5", {"nextn_predict_layers": 4}, "no layers remain"),
        ("qwen3_5", {"rope.dimension_count": 5}, "rotary_dim is 5"),
        ("qwen3_5", {"expert_count": 8}, "'qwen35' with them is not supported"),
        ("qwen3_5_moe", {"expert_used_count": None}, r"qwen35moe\.expert_used_count is missing"),
        (
            "qwen3_5_moe",
            {"expert_shared_feed_forward_length": None},
            "expert_shared_feed_forward_length is mis",
        ),
        ("qwen3_moe", {"expert_used_count": 99}, "99 experts per token"),
        ("qwen3_moe", {"expert_feed_forward_length": None}, "expert_feed_forward_length is missing"),
        ("qwen3_moe", {"rope.dimension_count": 4}, "not all 16 of a head"),
    ],
)
def test_metadata_that_does_not_fit_is_one_clear_error(
    tmp_path: Path, family: str, metadata: dict, message: str
) -> None:
    write(tmp_path / "t.gguf", family, metadata=metadata)
    with pytest.raises(ConfigError, match=message) as error:
        gguf.target_config(tmp_path / "t.gguf")
    assert str(error.value).startswith(str(tmp_path / "t.gguf"))


# --- tensors that do not fit --------------------------------------------------------------------------


def test_all_problems_are_listed_at_once(tmp_path: Path) -> None:
    config = config_of("qwen3_5_moe")
    changes = {
        "blk.0.ssm_a": np.full(6, 0.5),
        "blk.0.ssm_dt.bias": np.ones(5),
        "blk.0.ssm_out.weight": np.ones((32, 64)),
        "blk.1.ffn_up_exps.weight": None,
        "blk.2.ssm_conv1d.weight": np.ones((128, 3)),
        "blk.3.nextn.eh_proj.weight": np.ones((32, 64)),
        "v.blk.0.attn_q.weight": np.ones((4, 4)),
    }
    path = hybrid_gguf.write(tmp_path / "t.gguf", config, params_of(config), changes=changes)
    abstract = targets.abstract_params(config)
    for read in (
        lambda: gguf.check_target(path, config, abstract),
        lambda: gguf.load_target(path, config, abstract, np.float32),
    ):
        with pytest.raises(ConfigError) as error:
            read()
        for part in (
            "blk.0.ssm_a must be negative",
            "blk.0.ssm_dt.bias is [5], expected [6]",
            "blk.0.ssm_out.weight is [32, 64], expected [32, 96]",
            "missing blk.1.ffn_up_exps.weight [",
            "blk.2.ssm_conv1d.weight is [128, 3], expected [128, 4]",
            "unknown blk.3.nextn.eh_proj.weight",  # within the model's own layers
            "unknown v.blk.0.attn_q.weight",
        ):
            assert part in str(error.value)
        assert str(error.value).count(";") == 6


def test_random_damage_gives_a_config_error_or_a_load(tmp_path: Path) -> None:
    config = config_of("qwen3_5_moe")
    good = hybrid_gguf.write(tmp_path / "t.gguf", config, params_of(config), kind="Q8_0")
    data = good.read_bytes()
    abstract = targets.abstract_params(config)

    def load(changed: bytes, i: int) -> None:
        path = tmp_path / f"{i}.gguf"
        path.write_bytes(changed)
        loaded = gguf.load_target(path, gguf.target_config(path), abstract, np.float32)
        assert {name: leaf.shape for name, leaf in flatten(loaded).items()} == {
            name: leaf.shape for name, leaf in flatten(abstract).items()
        }
        path.unlink()

    assert_only_config_errors(load, data, data.index(b"output_norm.weight") + 60, seed=1)
