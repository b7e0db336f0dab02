"""One training step, and the predictions that evaluation needs: the compiled part of training.

Features are computed here, by the frozen target's forward over the batch, unless the batch brings them
from a store. Denominators are global: numerators and weights are summed over microbatches (and, under
sharding, over devices) before they are divided.
"""

from __future__ import annotations

import dataclasses
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
from dflash_jax.config import ConfigError
from dflash_jax.drafts.dflash import DFlash
from dflash_jax.numerics import contract
from dflash_jax.targets import Decoder
from train import loss as losses
from train.anchors import Blocks, chunk_starts, eligible, layout, sample_anchors
from train.forward import hidden_states


@dataclass(frozen=True)
class Setup:
    """Static choices of a step.

    anchors: A, blocks per sequence; fixed: at every C-th answer token instead of at random. loss: "decay"
    or "dpace"; gamma: decay of the slots' weights. candidates: size of the set that cross-entropy is over,
    0 is the vocabulary, which every full_every-th step sees anyway. chunk: rows of logits that live at
    once. dtype: of the draft's activations and of the copy of its weights that a step multiplies with;
    the weights themselves stay float32. soft: share of the loss that is cross-entropy with the target's
    distribution at soft_temperature instead of the label. decay: AdamW's, on matrices only.
    """

    target: Decoder
    draft: DFlash
    anchors: int
    gamma: float
    loss: str = "decay"
    fixed: bool = False
    candidates: int = 0
    full_every: int = 8
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
    arrays of JAX or NumPy.

    features [B, S, P*D] (the tapped states) and, for soft labels, final [B, S, D] (the target's normed
    last states) may come from a store; where they are None the step runs the target.
    """

    tokens: Any
    valid: Any
    supervised: Any
    features: Any = None
    final: Any = None


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


def at_step(setup: Setup, step: int) -> Setup:
    """The setup of this update: with candidates, every full_every-th is over the whole vocabulary."""
    whole = setup.candidates and step % setup.full_every == 0
    return dataclasses.replace(setup, candidates=0) if whole else setup


@partial(jax.jit, static_argnames="setup")
def train_step(
    setup: Setup,
    target_params: Any,
    state: State,
    batches: Batch,
    key: jax.Array,
    rate: Float[Array, ""],
    frequency: Float[Array, " V"] | None = None,
) -> tuple[State, losses.Metrics, Float[Array, ""]]:
    """One update from M microbatches ([M, B, S]: gradients accumulate over the first axis). The key
    draws the anchors; frequency (how often each token occurs) fills the candidate set. Returns the new
    state, sums of metrics, and the gradient's norm before clipping."""

    def numerator(params: Any, batch: Batch, key: jax.Array) -> tuple[Array, losses.Metrics]:
        possible = eligible(batch.supervised)
        if setup.fixed:
            possible = possible & chunk_starts(batch.supervised, setup.draft.config.block_size)
        anchors = sample_anchors(key, possible, setup.anchors)
        _, measured = _objective(setup, target_params, params, batch, *anchors, frequency)
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
    """Leading matches of the blocks at given anchors (what a round there would accept), and metrics, over
    the whole vocabulary."""
    setup = dataclasses.replace(setup, candidates=0)
    return _objective(setup, target_params, params, batch, anchors, keep)


def _objective(
    setup: Setup,
    target_params: Any,
    params: Any,
    batch: Batch,
    anchors: Int[Array, "B A"],
    keep: Bool[Array, "B A"],
    frequency: Float[Array, " V"] | None = None,
) -> tuple[Int[Array, "B A"], losses.Metrics]:
    """Leading matches per block, and metrics whose `loss` is the numerator to differentiate."""
    draft = setup.draft
    blocks = layout(
        batch.tokens, batch.supervised, anchors, keep, draft.config.block_size, draft.config.mask_token_id
    )
    features, final = target_states(setup, target_params, batch)
    shape = blocks.inputs.shape
    embeddings = _apply(
        setup.target, target_params, blocks.inputs.reshape(shape[0], -1), method="embed"
    ).reshape(*shape, -1)
    dtype = jnp.dtype(setup.dtype)
    weights, features, embeddings = jax.tree.map(lambda x: x.astype(dtype), (params, features, embeddings))
    hidden = hidden_states(draft, weights, features, embeddings, blocks.anchors, setup.remat)

    table = target_params["embed_tokens" if setup.target.config.tie_word_embeddings else "lm_head"]["weight"]
    ids = blocks.labels.reshape(shape[0], -1)
    if setup.candidates:
        assert frequency is not None, "a candidate set needs the tokens' frequencies"
        if setup.candidates < min(ids.size, len(table)):
            raise ConfigError(
                f"objective.candidates is {setup.candidates}: it must hold the {ids.size} labels of a microbatch "
                "(data.tokens / width * objective.anchors * (block_size - 1))"
            )
        chosen = losses.candidate_set(frequency, ids.reshape(-1), setup.candidates)
        table, ids = table[chosen], jnp.searchsorted(chosen, ids).astype(jnp.int32)

    def head(states: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        # the table decides what it is multiplied with: a float32 one does not take bf16 rows
        return contract("...d,vd->...v", states.astype(table.dtype), table)

    scores = losses.score(
        lambda states: draft.logits(states, head),
        hidden.reshape(shape[0], -1, hidden.shape[-1]),
        ids,
        setup.chunk,
        None if final is None else _before(final, blocks),
        head,
        setup.soft,
        setup.soft_temperature,
    )
    scores = jax.tree.map(lambda x: x.reshape(blocks.labels.shape), scores)
    if setup.loss == "dpace":
        parts = losses.dpace(scores.loss, scores.cross_entropy, blocks.supervised)
    else:
        parts = losses.weighted(scores.loss, blocks.supervised, setup.gamma)
    measured = losses.metrics(*parts, scores.rank, blocks.supervised)
    return losses.leading((scores.rank == 0) & blocks.supervised), measured


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
    if batch.features is not None:
        assert not setup.soft or batch.final is not None, "soft labels need the target's last states"
        return batch.features, batch.final if setup.soft else None
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
    return features, _apply(setup.target.final_norm(c.rms_norm_eps), target_params["norm"], last)


def _apply(module: nn.Module, params: Any, *args: Any, **kwargs: Any) -> Any:
    return module.apply({"params": params}, *args, **kwargs)


def _before(final: Float[Array, "B S D"], blocks: Blocks) -> Float[Array, "B R D"]:
    """The states whose logits are the distributions of slots 1..C-1: those one position earlier."""
    positions = blocks.anchors[:, :, None] + jnp.arange(blocks.size - 1, dtype=jnp.int32)[None, None]
    index = jnp.minimum(positions, final.shape[1] - 1).reshape(final.shape[0], -1, 1)
    return jnp.take_along_axis(final, index, axis=1)


# --- a tiny target (train/language_model.py) --------------------------------------------------------------


def language_optimizer() -> optax.GradientTransformation:
    """AdamW without its learning rate, as of a draft, with more decay: tiny targets see little text often."""
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(0.9, 0.95),
        optax.add_decayed_weights(0.1, mask=partial(jax.tree.map, lambda x: x.ndim > 1)),
    )


@partial(jax.jit, static_argnames="target")
def language_step(
    target: Decoder, state: State, tokens: Int[Array, "B S"], rate: Float[Array, ""]
) -> tuple[State, Float[Array, ""]]:
    """One update of a target on whole rows of text, and the mean cross-entropy (nats) of positions 1 .. S-1
    given all before them."""

    def loss(params: Any) -> Array:
        cache = target_cache(target.config, tokens.shape[0], 0, jnp.float32)
        logits = _apply(target, params, chain_block(tokens[:, :-1]), cache, logits="all").logits
        right = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - right)

    value, gradient = jax.value_and_grad(loss)(state.params)
    with jax.numpy_dtype_promotion("standard"):  # optax raises a float to the integer step count
        updates, inner = language_optimizer().update(gradient, state.optimizer, state.params)
    params = jax.tree.map(lambda x, u: x - rate * u, state.params, updates)
    return State(params, inner, state.step + 1), value


# --- the store of hidden states (train/features.py) -------------------------------------------------------


@partial(jax.jit, static_argnames="setup")
def stored_states(
    setup: Setup, target_params: Any, batch: Batch
) -> tuple[Float[Array, "B S PD"], Float[Array, "B S D"] | None]:
    """What a step would compute, as the store keeps it: in bfloat16."""
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), target_states(setup, target_params, batch))
