"""Configs refuse what cannot work, with a sentence that names the field, and are static arguments."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from dflash_jax import testing
from dflash_jax.config import (
    FULL,
    RECURRENT,
    SLIDING,
    ConfigError,
    MoeConfig,
    RecurrentConfig,
    RopeConfig,
    Training,
    check_block_size,
    check_pair,
    default_taps,
)
from dflash_jax.targets import make_target

TARGET = testing.target_config()
DRAFT = testing.draft_config(TARGET)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"theta": 0.0}, "theta is 0.0"),
        ({"theta": 1e4, "type": "longrope"}, "'longrope' is not supported"),
        ({"theta": 1e4, "type": "linear", "factor": 0.0}, "factor is 0.0"),
        ({"theta": 1e4, "type": "yarn", "factor": 4.0}, "original_max_position_embeddings"),
        ({"theta": 1e4, "type": "llama3", "factor": 4.0}, "original_max_position_embeddings"),
    ],
)
def test_rope_refuses(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RopeConfig(**fields)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"num_kv_heads": 3}, "4 query heads over 3"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"layer_types": (FULL,)}, "1 layer types for 2 layers"),
        ({"layer_types": (FULL, "conv")}, "'conv' is not supported"),
        ({"layer_types": (FULL, RECURRENT)}, "of no stated shape"),
        (
            {"layer_types": (RECURRENT, RECURRENT), "recurrent": RecurrentConfig(1, 2, 4, 4)},
            "no attention layer",
        ),
        ({"rotary_dim": 20}, "rotary_dim is 20"),
        ({"moe": MoeConfig(4, 2, 8, (True,))}, "says of 1 layers"),
        ({"layer_types": (FULL, SLIDING)}, "no sliding_window"),
    ],
)
def test_target_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        testing.target_config(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 0}, "draft num_heads is 0"),
        ({"block_size": 1}, "block_size is 1"),
        ({"taps": ()}, "target_layer_ids"),
        ({"taps": (0, 2)}, "taps target layer 2, but the target has 2"),
        ({"taps": (-1,)}, "taps target layer -1"),
        ({"mask_token_id": testing.VOCAB}, f"mask_token_id is {testing.VOCAB}"),
        ({"mask_token_id": -1}, "mask_token_id is -1"),
        ({"causal": (True,)}, "causality for 1 of 2"),
    ],
)
def test_draft_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        testing.draft_config(TARGET, **changes)


def test_layers_are_full_unless_named_and_sliding_ones_causal() -> None:
    assert TARGET.layer_types == (FULL, FULL)
    assert DRAFT.causal == (False, False)
    mixed = testing.draft_config(TARGET, layer_types=(SLIDING, FULL), sliding_window=5)
    assert mixed.causal == (True, False)
    assert (mixed.window(0), mixed.window(1)) == (5, None)
    target = testing.target_config(layer_types=(FULL, SLIDING), sliding_window=7)
    assert (target.window(0), target.window(1)) == (None, 7)


def test_configs_are_hashable_by_value() -> None:
    """A static argument that compared by identity would compile again for every load."""
    assert hash(TARGET) == hash(testing.target_config())
    assert hash(DRAFT) == hash(testing.draft_config(testing.target_config()))
    assert make_target(TARGET) == make_target(testing.target_config())
    assert hash(make_target(TARGET)) == hash(make_target(testing.target_config()))
    with pytest.raises(dataclasses.FrozenInstanceError):
        TARGET.hidden_size = 64  # type: ignore[misc]


def test_hash_is_of_the_architecture() -> None:
    same = dataclasses.replace(TARGET, max_positions=99, rms_norm_eps=9.99999999e-7)
    scaled = dataclasses.replace(TARGET, rope=RopeConfig(1e4, "linear", factor=2.0))
    assert TARGET.hash() == same.hash() == scaled.hash()
    for changes in ({"hidden_size": 64}, {"rope": RopeConfig(1e5)}, {"rms_norm_eps": 1e-5}):
        assert TARGET.hash() != dataclasses.replace(TARGET, **changes).hash(), changes


@pytest.mark.parametrize(
    ("layers", "count", "taps"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (28, 1, (14,)),
        (30, 5, (1, 8, 14, 20, 27)),  # the halves 7.5 and 20.5 round to even
        (64, 5, (1, 16, 31, 46, 61)),
        (32, 2, (1, 29)),
    ],
)
def test_default_taps(layers: int, count: int, taps: tuple[int, ...]) -> None:
    assert default_taps(layers, count) == taps


@pytest.mark.parametrize(
    ("changes", "numbers"),
    [
        ({"hidden_size": 64}, ("hidden size", "64", "32")),
        ({"vocab_size": 13}, ("vocabulary", "13", "11")),
        ({"num_target_layers": 3}, ("depth", "3", "2")),
    ],
)
def test_a_draft_of_another_target_is_refused(changes: dict[str, Any], numbers: tuple[str, ...]) -> None:
    check_pair(TARGET, DRAFT)
    with pytest.raises(ConfigError) as error:
        check_pair(TARGET, testing.draft_config(TARGET, **changes))
    assert all(number in str(error.value) for number in numbers), error.value


def test_block_size_up_to_the_trained_one() -> None:
    for size in range(2, testing.BLOCK + 1):
        check_block_size(DRAFT, size)
    for size in (1, testing.BLOCK + 1):
        with pytest.raises(ConfigError, match=f"block size {size}"):
            check_block_size(DRAFT, size)


def test_family_is_named_when_unknown() -> None:
    with pytest.raises(ConfigError, match="'gpt2' is not supported"):
        make_target(testing.target_config(family="gpt2"))


def test_training_metadata_is_part_of_the_config() -> None:
    stamped = testing.draft_config(TARGET, training=Training(loss_decay=4.0))
    assert stamped != DRAFT
    assert stamped.training.loss_decay == 4.0


def test_what_a_model_does_not_have_is_in_no_digest() -> None:
    """Feature stores and checkpoints know their target by these fields: a new kind of layer must not turn
    a dense model into another one."""
    dense = set(testing.target_config("qwen3").fields())
    assert dense.isdisjoint({"recurrent", "moe", "rotary_dim", "max_positions"}) and "sliding_window" in dense
    assert {"recurrent", "moe", "rotary_dim"} <= set(testing.target_config("qwen3_5_moe").fields())
