"""Which device holds what. JAX runs a program where its arguments are, so a placement is nothing but where the
arrays are: no program knows of it.

Two devices: the draft's parameters and its context are on one, everything else on the other. What crosses are the
features of committed positions (Luce's `DraftFeatureMirror`) and the embeddings of the block on the way there,
and the draft's hidden states on the way back, as the head is the target's. One program cannot run on both, so the
stepwise loop does.

A mesh: one program on all devices. The target's matrices are cut as in Megatron-LM (arXiv 1909.08053), the draft
is whole everywhere, and XLA's partitioner adds the sums. So the compiled loop runs as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array

from dflash_jax.cache import DraftCache, KVCache, TargetCache
from dflash_jax.config import TargetConfig
from dflash_jax.state import Models

HEADS = "heads"  # the mesh's only axis

# Matrices [out, in] that are cut by outputs (with their biases), and by inputs. Experts have theirs in front.
_OUTPUTS = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "gate_up_proj", "embed_tokens", "lm_head"}
_INPUTS = {"o_proj", "down_proj"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}


def with_draft_on(models: Models, device: jax.Device) -> Models:
    """The same models, the draft on another device."""
    return dataclasses.replace(models, draft_params=jax.device_put(models.draft_params, device))


def tensor_parallel(models: Models, devices: Sequence[jax.Device]) -> Models:
    """The same models on all of these devices: each has its heads, its part of the MLPs and of the vocabulary, and
    the whole draft. What the number of devices does not divide is whole on each (a head is never cut), and so are
    norms and gated delta layers."""
    mesh = Mesh(np.asarray(devices), (HEADS,))

    def place(path: tuple, leaf: Any) -> Array:
        names = [str(entry.key) for entry in path]
        return jax.device_put(
            leaf, NamedSharding(mesh, cut(names, np.shape(leaf), models.target.config, mesh.size))
        )

    return dataclasses.replace(
        models,
        target_params=jax.tree_util.tree_map_with_path(place, models.target_params),
        draft_params=jax.device_put(models.draft_params, NamedSharding(mesh, PartitionSpec())),
        draft_head=jax.tree_util.tree_map_with_path(place, {"lm_head": models.draft_head})["lm_head"],
    )


def cut(names: list[str], shape: tuple[int, ...], config: TargetConfig, parts: int) -> PartitionSpec:
    owner = names[-2] if names[-1] in ("weight", "bias") else names[-1]
    if owner in _OUTPUTS:
        axis = max(0, len(shape) - 2)
    elif owner in _INPUTS and len(shape) > 1:
        axis = len(shape) - 1
    else:
        return PartitionSpec()
    whole = config.num_kv_heads if owner in _ATTENTION else shape[axis]
    return (
        PartitionSpec()
        if whole % parts
        else PartitionSpec(*(HEADS if i == axis else None for i in range(len(shape))))
    )


# --- what follows the parameters ------------------------------------------------------------------------


def follow(x: Any, like: Array) -> Array:
    """x on the devices of `like`, and whole there. The same x when it is there already."""
    return jax.device_put(x, _whole(like))


def target_cache_beside(cache: TargetCache, params: Any) -> TargetCache:
    """An empty cache of these shapes, made where the parameters are and nowhere before: keys and values are cut by
    heads where the projection is."""
    layers = []
    for i, layer in enumerate(cache.layers):
        weights = params[f"layers_{i}"]
        where = _whole(jax.tree.leaves(weights)[0])
        if isinstance(layer, KVCache):
            where = _by_heads(weights["self_attn"]["k_proj"]["weight"])
        layers.append(_zeros(layer, where))
    return TargetCache(tuple(layers), _zeros(cache.length, _whole(jax.tree.leaves(params)[0])))


def draft_cache_beside(cache: DraftCache, params: Any) -> DraftCache:
    return cast(DraftCache, _zeros(cache, _whole(jax.tree.leaves(params)[0])))


def _zeros(shapes: Any, where: Sharding | None) -> Any:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=where), shapes)


def _whole(like: Any) -> Sharding | None:
    where = getattr(like, "sharding", None)  # NumPy arrays are nowhere yet
    return NamedSharding(where.mesh, PartitionSpec()) if isinstance(where, NamedSharding) else where


def _by_heads(like: Any) -> Sharding | None:
    """Of [B, K, S, H], when `like` makes K * H outputs."""
    where = getattr(like, "sharding", None)
    if isinstance(where, NamedSharding) and where.spec and where.spec[0] is not None:
        return NamedSharding(where.mesh, PartitionSpec(None, where.spec[0]))
    return _whole(like)
