"""How devices share the work: one mesh with two axes, by configuration only.

    data    devices that hold everything and see different conversations
    fsdp    devices that each hold a part of every weight, and see different conversations too

A batch is cut over both axes, a weight (of the draft, of its moments, of the frozen target) over `fsdp`.
The step is the one-device step: XLA's partitioner adds the gathers and sums from these shardings.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dflash_jax.config import ConfigError
from train import settings
from train.step import Batch

_log = logging.getLogger(__name__)

DATA, FSDP = "data", "fsdp"


def connect(choice: settings.Mesh) -> None:
    """Join the other processes of the run, if there are any: before anything else touches a device."""
    given = (choice.coordinator, choice.processes, choice.process_id)
    if given == (None, None, None):
        return
    for name, value in zip(("coordinator", "processes", "process_id"), given, strict=True):
        if value is None:
            raise ConfigError(
                f"mesh.{name} is missing: several hosts need coordinator, processes and process_id"
            )
    assert choice.processes is not None and choice.process_id is not None
    if not 0 <= choice.process_id < choice.processes:
        raise ConfigError(f"mesh.process_id is {choice.process_id}: it must be 0 to {choice.processes - 1}")
    jax.distributed.initialize(*given)


def make(choice: settings.Mesh) -> Mesh:
    """All devices as [data, fsdp]; one process may also use the first few of its devices only."""
    devices = jax.devices()
    fsdp = choice.fsdp
    data = len(devices) // max(fsdp, 1) if choice.data == -1 else choice.data
    used = data * fsdp
    whole = used == len(devices) if choice.data == -1 or jax.process_count() > 1 else used <= len(devices)
    if min(data, fsdp) < 1 or not whole:
        raise ConfigError(
            f"mesh.data {choice.data} and mesh.fsdp {fsdp} do not divide the {len(devices)} devices that JAX sees"
        )
    return Mesh(np.asarray(devices[:used]).reshape(data, fsdp), (DATA, FSDP))


def shards(mesh: Mesh) -> int:
    """How many parts a batch is cut into: rows of every microbatch are a multiple of this."""
    return math.prod(mesh.devices.shape)


def sharding(mesh: Mesh, shape: tuple[int, ...]) -> NamedSharding:
    """Of a weight: the longest axis that `fsdp` divides is cut (the first of equals); vectors and what
    cannot be cut are whole on every device."""
    parts = mesh.shape[FSDP]
    cut = [axis for axis, size in enumerate(shape) if size % parts == 0]
    if parts == 1 or len(shape) < 2 or not cut:
        return NamedSharding(mesh, PartitionSpec())
    longest = max(cut, key=lambda axis: shape[axis])
    return NamedSharding(
        mesh, PartitionSpec(*(FSDP if axis == longest else None for axis in range(len(shape))))
    )


def place(mesh: Mesh, tree: Any) -> Any:
    """Weights on the mesh. Every process holds the same whole tree and keeps its devices' parts."""

    def leaf(x: Any) -> jax.Array:
        where = sharding(mesh, np.shape(x))
        if jax.process_count() == 1:
            return jax.device_put(x, where)
        whole = np.asarray(x)
        return jax.make_array_from_callback(whole.shape, where, lambda index: whole[index])

    return jax.tree.map(leaf, tree)


def abstract(mesh: Mesh, tree: Any) -> Any:
    """Shapes, dtypes and places of `place(mesh, tree)`."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(mesh, x.shape)), tree
    )


def feed(mesh: Mesh, batch: Batch) -> Batch:
    """Microbatches [M, B, ...] on the mesh, cut over B. Every process makes the same batch and hands over
    the rows of its own devices only."""
    where = NamedSharding(mesh, PartitionSpec(None, (DATA, FSDP)))

    def leaf(x: np.ndarray) -> jax.Array:
        if jax.process_count() == 1:
            return jax.device_put(x, where)
        return jax.make_array_from_callback(x.shape, where, lambda index: x[index])

    return jax.tree.map(leaf, batch)


def host(tree: Any) -> Any:
    """The whole tree as NumPy arrays, on every process. What is cut is gathered by a program of its own: no
    other may be running, as processes that meet in two programs at once wait for each other for ever."""

    def leaf(x: jax.Array) -> np.ndarray:
        if x.is_fully_replicated or x.is_fully_addressable:
            return np.asarray(x)
        return np.asarray(multihost_utils.process_allgather(x, tiled=True))

    return jax.tree.map(leaf, tree)


def describe(mesh: Mesh) -> str:
    data, fsdp = mesh.devices.shape
    kind = mesh.devices.flat[0].device_kind
    return f"{data * fsdp} x {kind} (data {data}, fsdp {fsdp}, {jax.process_count()} processes)"
