"""Eight devices compute what one does, and none of them holds what the others should."""

from __future__ import annotations

import re
from typing import Any

import fitting
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dflash_jax import testing
from dflash_jax.block import chain_block
from dflash_jax.cache import target_cache
from dflash_jax.config import ConfigError
from dflash_jax.drafts import DFlash, abstract_params
from dflash_jax.targets.decoder import TargetOutput
from dflash_jax.testing import random_params
from train import mesh, settings, step

ROWS, LENGTH, ANCHORS = 16, 24, 12
SETUP = step.Setup(
    fitting.target().module, DFlash(fitting.DRAFT), anchors=ANCHORS, gamma=2.0, chunk=64, remat=False
)


def batches() -> step.Batch:
    """Two microbatches of unequal rows: only sums over all devices give one device's denominators."""
    tokens = np.random.default_rng(0).integers(4, 64, (2, ROWS, LENGTH)).astype(np.int32)
    position = np.broadcast_to(np.arange(LENGTH), tokens.shape)
    ends = LENGTH - np.arange(ROWS)[None, :, None] % 9
    return step.Batch(tokens, position < ends, (position < ends) & (position >= 4))


def compiled(data: int, fsdp: int) -> tuple[Any, tuple[Any, ...]]:
    """The step on this mesh, and its arguments."""
    devices = mesh.make(settings.Mesh(data=data, fsdp=fsdp))
    state = step.init_state(SETUP, random_params(abstract_params(fitting.DRAFT), gain=1.0))
    target = mesh.place(devices, fitting.target().params)
    arguments = (target, mesh.place(devices, state), mesh.feed(devices, batches()))
    arguments = (*arguments, jax.random.key(3), jnp.float32(1e-3))
    return step.train_step.lower(SETUP, *arguments).compile(), arguments


@pytest.fixture(scope="module")
def one() -> tuple[Any, tuple[Any, ...], Any]:
    program, arguments = compiled(1, 1)
    return program, arguments, program(*arguments)


@pytest.mark.parametrize(("data", "fsdp"), [(8, 1), (2, 4)])
def test_the_gradient_on_eight_devices_is_that_on_one(one: Any, data: int, fsdp: int) -> None:
    alone, _, (state, measured, norm) = one
    program, arguments = compiled(data, fsdp)
    found, total, other = program(*arguments)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5), (total, other), (measured, norm))
    # the first moment after one step is a tenth of the (clipped) gradient
    moments = (x.optimizer[1].mu for x in (found, state))
    scale = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(state.optimizer[1].mu))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5 * scale), *moments)
    # what goes in comes out at the same place, so the next step is the same program
    places = jax.tree.map(lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim), found, arguments[1])
    assert all(jax.tree.leaves(places))
    # each device has its own rows only: less memory, and no gather of anything like the hidden states
    assert program.memory_analysis().temp_size_in_bytes < alone.memory_analysis().temp_size_in_bytes / 4
    assert max(gathered(program.as_text()), default=0) < ROWS * ANCHORS * 3 * 32 / 4


def gathered(program: str) -> list[int]:
    """Elements of the results of all-gathers."""
    shapes = re.findall(r"= [a-z0-9]+\[([\d,]*)\]\S* all-gather\(", program)
    return [int(np.prod([int(size) for size in shape.split(",") if size])) for shape in shapes]


def test_weights_are_cut_where_they_can_be() -> None:
    devices = mesh.make(settings.Mesh(data=2, fsdp=4))
    assert mesh.shards(devices) == 8
    for shape, parts in {
        (): PartitionSpec(),
        (64,): PartitionSpec(),  # a vector
        (64, 32): PartitionSpec("fsdp", None),
        (32, 64): PartitionSpec(None, "fsdp"),
        (6, 12): PartitionSpec(None, "fsdp"),  # the only axis that 4 divides
        (6, 7): PartitionSpec(),
        (160, 1, 4): PartitionSpec("fsdp", None, None),  # the convolution of a gated delta layer
        (5, 24, 32): PartitionSpec(None, None, "fsdp"),  # experts
    }.items():
        assert mesh.sharding(devices, shape).spec == parts, shape
    placed = mesh.place(devices, {"a": np.ones((64, 32), np.float32)})["a"]
    assert placed.addressable_shards[0].data.shape == (16, 32)


def test_a_target_that_is_cut_says_the_same() -> None:
    """Gated delta layers over 8 devices: logits and features of one device."""
    config = testing.target_config("qwen3_5", num_layers=2)
    models = testing.make_models(config)
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, (2, 12)).astype(np.int32)

    @jax.jit
    def forward(params: Any, tokens: jax.Array) -> TargetOutput:
        cache = target_cache(config, 2, 0, jnp.float32)
        return models.target.apply({"params": params}, chain_block(tokens), cache, (0, 1))

    alone = forward(models.target_params, tokens)
    devices = mesh.make(settings.Mesh(data=2, fsdp=4))
    cut = mesh.place(devices, models.target_params)
    assert any(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(cut))
    found = forward(cut, jax.device_put(tokens, mesh.sharding(devices, ())))
    for a, b in ((found.logits, alone.logits), (found.features, alone.features)):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_a_mesh_that_the_devices_do_not_make_is_refused() -> None:
    assert mesh.make(settings.Mesh()).devices.shape == (8, 1)
    assert mesh.make(settings.Mesh(fsdp=4)).devices.shape == (2, 4)
    assert mesh.make(settings.Mesh(data=2, fsdp=1)).devices.shape == (2, 1)  # the first two
    for wrong in (
        settings.Mesh(fsdp=3),
        settings.Mesh(fsdp=0),
        settings.Mesh(data=16),
        settings.Mesh(data=0),
    ):
        with pytest.raises(ConfigError, match=r"mesh\.data"):
            mesh.make(wrong)


def test_several_hosts_need_all_of_their_settings() -> None:
    with pytest.raises(ConfigError, match=r"mesh\.processes is missing"):
        mesh.connect(settings.Mesh(coordinator="127.0.0.1:1"))
    with pytest.raises(ConfigError, match=r"mesh\.process_id is 2"):
        mesh.connect(settings.Mesh(coordinator="127.0.0.1:1", processes=2, process_id=2))
