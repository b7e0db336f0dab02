"""A checkpoint gives back what was saved, or says what differs: orbax itself casts and cuts in silence."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.config import ConfigError
from train.checkpoints import Checkpoints, Saved, about, read_params
from train.step import State

CONTRACT = {"block_size": 4, "taps": (0, 1)}


def state(scale: float = 1.0) -> State:
    params = {"a": {"weight": jnp.arange(6, dtype=jnp.float32).reshape(2, 3) * scale}}
    moments = ((), (jnp.asarray(3, jnp.int32), params))
    return State(params, moments, jnp.asarray(7, jnp.int32))


def saved(step: int) -> Saved:
    return Saved(step, dict(CONTRACT), [1, 2**32 - 1], {"position": 5}, None)


def abstract(of: State, dtype: type | None = None) -> State:
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=where), of)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with Checkpoints(tmp_path, 1) as checkpoints:
        checkpoints.save(state(0.1), saved(7))
    return tmp_path


def test_everything_comes_back(folder: Path) -> None:
    with Checkpoints(folder, 1) as checkpoints:
        assert checkpoints.latest == checkpoints.best == 7
        found, told = checkpoints.restore(7, abstract(state()), CONTRACT)
    jax.tree.map(np.testing.assert_array_equal, found, state(0.1))
    assert jax.tree.structure(found) == jax.tree.structure(state())
    assert told.key == [1, 2**32 - 1] and told.data == {"position": 5} and told.walk is None
    params = read_params(folder / "7", state().params)
    np.testing.assert_array_equal(params["a"]["weight"], state(0.1).params["a"]["weight"])
    assert isinstance(params["a"]["weight"], np.ndarray)


def test_only_who_writes_removes_what_is_half_written(folder: Path) -> None:
    half = folder / "9.orbax-checkpoint-tmp-1"
    half.mkdir()
    for writing in (False, True):
        with Checkpoints(folder, 1, writing) as checkpoints:
            checkpoints.save(state(), saved(8 + writing))
        assert half.exists() == (not writing)


def test_other_dtypes_shapes_and_names_are_refused(folder: Path) -> None:
    with Checkpoints(folder, 1) as checkpoints:
        with pytest.raises(ConfigError, match=r"a\.weight is float32 \[2, 3\], but this run has bfloat16"):
            checkpoints.restore(7, abstract(state(), jnp.bfloat16), CONTRACT)
        other = state().replace(optimizer=((), (jnp.asarray(3), {"b": jnp.zeros(2)})))
        with pytest.raises(
            ConfigError, match=r"0\.1\.1\.a\.weight is float32 \[2, 3\], but .* no such array"
        ):
            checkpoints.restore(7, abstract(other), CONTRACT)
    with pytest.raises(
        ConfigError, match=r"a\.weight is float32 \[2, 3\], but this run has float32 \[3, 3\]"
    ):
        read_params(folder / "7", {"a": {"weight": np.zeros((3, 3))}})


def test_another_contract_and_no_checkpoint_are_refused(folder: Path) -> None:
    with Checkpoints(folder, 1) as checkpoints:
        for field, wanted in (
            ("taps", {**CONTRACT, "taps": (0, 2)}),
            ("loss", {**CONTRACT, "loss": "decay"}),
        ):
            with pytest.raises(ConfigError, match=f"made with {field} "):
                checkpoints.restore(7, abstract(state()), wanted)
    (folder / "empty").mkdir()
    for name in ("empty", "absent"):
        with pytest.raises(ConfigError, match=f"{name}: not a checkpoint"):
            about(folder / name)
