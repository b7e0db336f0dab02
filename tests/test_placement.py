"""Where the arrays are changes nothing: two devices, a mesh and a table on the host decode what one device does."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from decoding import BLOCKS, BUDGET, PROMPTS, SEEDS, C, assert_same_run, pair, warm
from jax.sharding import PartitionSpec

from dflash_jax import decode, placement, targets, testing
from dflash_jax.config import ConfigError
from dflash_jax.embedding import HostTable, take_table
from dflash_jax.policy import Fixed
from dflash_jax.state import Models, Options, RoundState
from dflash_jax.stepwise import generate_stepwise
from dflash_jax.tree import TreeShape

ONE, OTHER = jax.devices()[:2]
TREE = Options(Fixed(C, 10), tree=TreeShape(9))


def on_host(models: Models) -> Models:
    params, table = take_table(models.target_params, models.target.config.tie_word_embeddings)
    return dataclasses.replace(models, target_params=params, table=table)


def two_devices(models: Models) -> Models:
    return placement.with_draft_on(models, OTHER)


def start(models: Models, options: Options, **how: Any) -> RoundState:
    how = {"max_new_tokens": BUDGET, "how": warm(), "seeds": SEEDS, "chunk_size": 10} | how
    return decode.prefill(models, PROMPTS, options, **how)


@functools.cache
def compiled(options: Options, family: str = "qwen3") -> RoundState:
    """What one device does, in one program."""
    return decode.generate(pair(family), start(pair(family), options), options)


def stepped(models: Models, state: RoundState, options: Options, **how: Any) -> RoundState:
    return [state, *(after for after, _ in generate_stepwise(models, state, options, **how))][-1]


def devices(tree: Any) -> set[jax.Device]:
    return {device for leaf in jax.tree.leaves(tree) for device in leaf.devices()}


@pytest.mark.parametrize("options", [BLOCKS, TREE], ids=["chain", "tree"])
def test_two_devices(options: Options) -> None:
    """Every round is that of the compiled loop; the draft's arrays stay on its device, all others on the other."""
    models = two_devices(pair())
    assert models.apart and models.in_pieces and not pair().in_pieces
    state = start(models, options)
    for _ in range(3):
        assert devices(state.draft_cache) == {OTHER}
        assert devices(dataclasses.replace(state, draft_cache=None)) == {ONE}
        state, _ = next(generate_stepwise(models, state, options))
    assert_same_run(stepped(models, state, options), compiled(options))


@pytest.mark.parametrize(
    ("changes", "how"),
    [({}, {}), ({}, {"verify": "sequential"}), ({"rollback": "replay"}, {}), ({}, {"bonus": "explicit"})],
    ids=["plain", "sequential", "replay", "explicit"],
)
def test_both_at_once_in_every_mode(changes: dict, how: dict) -> None:
    models, options = two_devices(on_host(pair())), dataclasses.replace(BLOCKS, **changes)
    state = stepped(models, start(models, options), options, **how)
    expected = compiled(BLOCKS)
    np.testing.assert_array_equal(state.tokens[:, :BUDGET], expected.tokens[:, :BUDGET])
    if "bonus" not in how:
        assert_same_run(state, expected)


def test_a_table_on_the_host() -> None:
    """The prompt layer by layer; then with a draft, and without one."""
    models = on_host(pair())
    assert "embed_tokens" not in models.target_params and models.table is not None
    state = start(models, BLOCKS, order="layers")
    before = models.table.seconds
    assert before > 0
    assert_same_run(stepped(models, state, BLOCKS), compiled(BLOCKS))
    assert models.table.seconds > before
    alone, options = models.without_draft(), Options(Fixed(1))
    assert alone.in_pieces and not alone.apart
    last = stepped(alone, start(alone, options), options)
    np.testing.assert_array_equal(last.tokens[:, :BUDGET], compiled(BLOCKS).tokens[:, :BUDGET])


def test_a_table_that_is_the_head_too_stays() -> None:
    """Of a tied target (llama) the rows come from the host all the same; its untied twin (qwen3) is above."""
    models = on_host(pair("llama"))
    assert "embed_tokens" in models.target_params
    assert models.table is not None
    spoiled = dataclasses.replace(models, table=HostTable(models.table.weight[::-1]))
    assert_same_run(stepped(models, start(models, BLOCKS), BLOCKS), compiled(BLOCKS, "llama"))
    assert not np.array_equal(start(spoiled, BLOCKS).anchor, start(models, BLOCKS).anchor)


def test_the_compiled_loop_refuses_models_in_pieces() -> None:
    for models in (two_devices(pair()), on_host(pair())):
        with pytest.raises(ConfigError, match="only generate_stepwise runs them"):
            decode.complete(models, PROMPTS, BLOCKS, max_new_tokens=4)
    with pytest.raises(ConfigError, match="only generate_stepwise looks it up there"):
        decode.generate(on_host(pair()), compiled(BLOCKS), BLOCKS)


def test_few_choices_are_the_targets_to_hold() -> None:
    """The draft's rows of the head stay with the target, cut as the head is."""
    few = pair().choosing_among(6)
    apart, state = two_devices(few), start(few, BLOCKS)
    (_, together), (_, seen) = (
        next(generate_stepwise(models, at, BLOCKS))
        for models, at in ((few, state), (apart, start(apart, BLOCKS)))
    )
    assert devices(apart.draft_head) == {ONE}
    np.testing.assert_array_equal(seen.block.tokens, together.block.tokens)
    cut = placement.tensor_parallel(few, jax.devices()[:2]).draft_head
    assert cut is not None and cut.addressable_shards[0].data.shape == (3, cut.shape[1])


# --- a mesh -----------------------------------------------------------------------------------------------


def test_one_program_on_a_mesh() -> None:
    """The compiled loop as it is; each device has its heads, and the whole draft."""
    models = placement.tensor_parallel(pair(), jax.devices()[:2])
    assert not models.in_pieces
    layer = models.target_params["layers_1"]
    halves = {
        "q_proj": layer["self_attn"]["q_proj"]["weight"],
        "o_proj": layer["self_attn"]["o_proj"]["weight"],
        "down_proj": layer["mlp"]["down_proj"]["weight"],
    }
    for name, leaf in halves.items():
        assert leaf.addressable_shards[0].data.size * 2 == leaf.size, name
    assert all(leaf.is_fully_replicated for leaf in jax.tree.leaves(models.draft_params))
    state = start(models, BLOCKS)
    keys = state.target_cache.layers[0].k
    assert keys.addressable_shards[0].data.shape == (len(PROMPTS), 1, *keys.shape[2:])
    assert_same_run(decode.generate(models, state, BLOCKS), compiled(BLOCKS))


@pytest.mark.parametrize(
    ("family", "path", "parts", "spec"),
    [
        ("qwen3", "layers_0/self_attn/q_proj/weight", 2, ("heads", None)),
        ("qwen3", "layers_0/self_attn/k_proj/weight", 4, ()),  # 2 heads are not cut in 4
        ("qwen3", "layers_0/mlp/up_proj/weight", 4, ("heads", None)),
        ("qwen3", "layers_0/mlp/up_proj/weight", 5, ()),
        ("qwen3", "layers_0/input_layernorm/weight", 2, ()),
        ("qwen3", "lm_head/weight", 11, ("heads", None)),
        ("qwen2", "layers_0/self_attn/v_proj/bias", 2, ("heads",)),
        ("qwen3_5", "layers_0/linear_attn/in_proj_qkv/weight", 2, ()),
        ("qwen3_moe", "layers_1/mlp/experts/gate_up_proj", 2, (None, "heads", None)),
        ("qwen3_moe", "layers_1/mlp/experts/down_proj", 2, (None, None, "heads")),
        ("qwen3_moe", "layers_1/mlp/gate/weight", 5, ()),
    ],
)
def test_what_is_cut(family: str, path: str, parts: int, spec: tuple) -> None:
    config = testing.target_config(family)
    leaf: Any = targets.abstract_params(config)
    for name in path.split("/"):
        leaf = leaf[name]
    assert placement.cut(path.split("/"), leaf.shape, config, parts) == PartitionSpec(*spec)
