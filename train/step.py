"""One training step, and the predictions that evaluation needs: the compiled part of training.

Features are computed here, by the frozen target's forward over the batch: a step reads tokens and
nothing else. Denominators are global: numerators and weights are summed over microbatches (and, under
sharding, over devices) before they are divided.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.block import chain_block
from dflash_jax.cache import target_cache
from dflash_jax.drafts.dflash import DFlash
from dflash_jax.layers import RMSNorm
from dflash_jax.targets import Decoder
from train import loss as losses
from train.anchors import Blocks, layout, sample_anchors
from train.forward import hidden_states


@dataclass(frozen=True)
class Setup:
    """Static choices of a step.

    anchors: A, blocks per sequence. gamma: decay of the slots' weights. chunk: rows of logits that live
    at once. dtype: of the draft's activations and of the copy of its weights that a step multiplies
    with; the weights themselves stay float32. soft: share of the loss that is cross-entropy with the
    target's distribution at soft_temperature instead of the label. decay: AdamW's, on matrices only.
    """

    target: Decoder
    draft: DFlash
    anchors: int
    gamma: float
    chunk: int = 2048
    dtype: str = "float32"
    soft: float = 0.0
    soft_temperature: float = 1.0
    clip: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.95
    decay: float = 0.01
    remat: bool = True


@struct.dataclass
class Batch:
    """tokens [B, S] i32, valid [B, S] bool (False: padding), supervised [B, S] bool (answer tokens):
    arrays of JAX or NumPy."""

    tokens: Any
    valid: Any
    supervised: Any


@struct.dataclass
class State:
    """params: the draft's master weights (float32). optimizer: optax state. step []: updates so far."""

    params: Any
    optimizer: Any
    step: Array


def optimizer(setup: Setup) -> optax.GradientTransformation:
    """AdamW without its learning rate, which every step is given: the loop owns the schedule, by steps
    or by time."""
    return optax.chain(
        optax.clip_by_global_norm(setup.clip),
        optax.scale_by_adam(setup.beta1, setup.beta2),
        optax.add_decayed_weights(setup.decay, mask=partial(jax.tree.map, lambda x: x.ndim > 1)),
    )


def init_state(setup: Setup, params: Any) -> State:
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    return State(params, optimizer(setup).init(params), jnp.zeros((), jnp.int32))


@partial(jax.jit, static_argnames="setup")
def train_step(
    setup: Setup, target_params: Any, state: State, batches: Batch, key: jax.Array, rate: Float[Array, ""]
) -> tuple[State, losses.Metrics, Float[Array, ""]]:
    """One update from M microbatches ([M, B, S]: gradients accumulate over the first axis). The key
    draws the anchors. Returns the new state, sums of metrics, and the gradient's norm before clipping."""

    def numerator(params: Any, batch: Batch, key: jax.Array) -> tuple[Array, losses.Metrics]:
        anchors = sample_anchors(key, batch.supervised, setup.anchors)
        _, measured = _objective(setup, target_params, params, batch, *anchors)
        return measured.loss, measured

    def micro(total: Any, item: tuple[Batch, jax.Array]) -> tuple[Any, losses.Metrics]:
        (_, measured), gradient = jax.value_and_grad(numerator, has_aux=True)(state.params, *item)
        return jax.tree.map(jnp.add, total, gradient), measured

    keys = jax.random.split(key, batches.tokens.shape[0])
    zero = jax.tree.map(jnp.zeros_like, state.params)
    gradient, measured = lax.scan(micro, zero, (batches, keys))
    measured = jax.tree.map(lambda x: x.sum(0), measured)
    gradient = jax.tree.map(lambda x: x / jnp.maximum(measured.weight, 1e-6), gradient)
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(gradient)))
    with jax.numpy_dtype_promotion("standard"):  # optax raises a float to the integer step count
        updates, inner = optimizer(setup).update(gradient, state.optimizer, state.params)
    params = jax.tree.map(lambda x, u: x - rate * u, state.params, updates)
    return State(params, inner, state.step + 1), measured, norm


@partial(jax.jit, static_argnames="setup")
def predict(
    setup: Setup,
    target_params: Any,
    params: Any,
    batch: Batch,
    anchors: Int[Array, "B A"],
    keep: Bool[Array, "B A"],
) -> tuple[Int[Array, "B A"], losses.Metrics]:
    """Leading matches of the blocks at given anchors (what a round there would accept), and metrics."""
    blocks, measured = _objective(setup, target_params, params, batch, anchors, keep)
    return blocks, measured


def _objective(
    setup: Setup,
    target_params: Any,
    params: Any,
    batch: Batch,
    anchors: Int[Array, "B A"],
    keep: Bool[Array, "B A"],
) -> tuple[Int[Array, "B A"], losses.Metrics]:
    """Leading matches per block, and metrics whose `loss` is the numerator to differentiate."""
    draft = setup.draft
    blocks = layout(
        batch.tokens, batch.supervised, anchors, keep, draft.config.block_size, draft.config.mask_token_id
    )
    features, final = target_states(setup, target_params, batch)
    head = partial(_apply, setup.target, target_params, method="head")
    shape = blocks.inputs.shape
    embeddings = _apply(
        setup.target, target_params, blocks.inputs.reshape(shape[0], -1), method="embed"
    ).reshape(*shape, -1)
    dtype = jnp.dtype(setup.dtype)
    weights, features, embeddings = jax.tree.map(lambda x: x.astype(dtype), (params, features, embeddings))
    hidden = hidden_states(draft, weights, features, embeddings, blocks.anchors, setup.remat)

    def logits(states: Float[Array, "R D"]) -> Float[Array, "R V"]:
        # the table decides what it is multiplied with: a float32 one does not take bf16 rows
        states = states[None].astype(jax.tree.leaves(target_params)[0].dtype)
        return draft.logits(states, head)[0]

    scores = losses.score(
        logits,
        hidden.reshape(-1, hidden.shape[-1]),
        blocks.labels.reshape(-1),
        setup.chunk,
        None if final is None else _before(final, blocks),
        lambda states: head(states[None])[0],
        setup.soft,
        setup.soft_temperature,
    )
    loss, best = (x.reshape(blocks.labels.shape) for x in (scores.loss, scores.best))
    measured = losses.metrics(
        *losses.weighted(loss, blocks.supervised, setup.gamma), best, blocks.labels, blocks.supervised
    )
    return losses.leading((best == blocks.labels) & blocks.supervised), measured


@partial(jax.jit, static_argnames=("target", "taps"))
def tapped(
    target: Decoder, target_params: Any, tokens: Int[Array, "B S"], taps: tuple[int, ...]
) -> Float[Array, "B S PD"]:
    """Outputs of these target layers over plain text."""
    dtype = jax.tree.leaves(target_params)[0].dtype
    cache = target_cache(target.config, tokens.shape[0], 0, dtype)
    block = chain_block(tokens)
    return _apply(target, target_params, block, cache, taps=taps, logits=None).features


def target_states(
    setup: Setup, target_params: Any, batch: Batch
) -> tuple[Float[Array, "B S PD"], Float[Array, "B S D"] | None]:
    """The tapped features, and the target's final normed states where soft labels need them."""
    c = setup.target.config
    rows = batch.tokens.shape[0]
    taps = setup.draft.config.taps + ((c.num_layers - 1,) if setup.soft else ())
    dtype = jax.tree.leaves(target_params)[0].dtype
    output = _apply(
        setup.target,
        target_params,
        chain_block(batch.tokens, batch.valid),
        target_cache(c, rows, 0, dtype),
        taps=taps,
        logits=None,
    )
    features = lax.stop_gradient(output.features)
    if not setup.soft:
        return features, None
    features, last = features[..., : -c.hidden_size], features[..., -c.hidden_size :]
    return features, _apply(RMSNorm(c.rms_norm_eps), target_params["norm"], last)


def _apply(module: nn.Module, params: Any, *args: Any, **kwargs: Any) -> Any:
    return module.apply({"params": params}, *args, **kwargs)


def _before(final: Float[Array, "B S D"], blocks: Blocks) -> Float[Array, "R D"]:
    """The states whose logits are the distributions of slots 1..C-1: those one position earlier."""
    positions = blocks.anchors[:, :, None] + jnp.arange(blocks.size - 1, dtype=jnp.int32)[None, None]
    index = jnp.minimum(positions, final.shape[1] - 1).reshape(final.shape[0], -1, 1)
    return jnp.take_along_axis(final, index, axis=1).reshape(-1, final.shape[-1])
