"""Both sides of every comparison: a tiny random PyTorch model, written to disk by its own library and read
back by our loaders. (The practice of levanter's tests.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from dflash.model import DFlashDraftModel

from dflash_jax import drafts, targets
from dflash_jax.block import Block
from dflash_jax.cache import TargetCache, commit, target_cache
from dflash_jax.config import TargetConfig
from dflash_jax.targets import TargetOutput
from dflash_jax.weights import hf

# Rows of a few dozen numbers: handing them to threads takes longer than the arithmetic.
torch.set_num_threads(1)
transformers.utils.logging.disable_progress_bar()

FLOAT32 = np.dtype(np.float32)
DEPTH, HIDDEN, VOCAB = 4, 32, 50
SHAPE: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
}
# {family: (its classes' prefix, its config class's suffix)}
TARGETS = {
    "llama": ("Llama", "Config"),
    "qwen2": ("Qwen2", "Config"),
    "qwen3": ("Qwen3", "Config"),
    "qwen3_moe": ("Qwen3Moe", "Config"),
    "qwen3_5": ("Qwen3_5", "TextConfig"),
    "qwen3_5_moe": ("Qwen3_5Moe", "TextConfig"),
}
# Fields that only one family has.
_HYBRID = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 10,
}
# The size of an expert is what PyTorch multiplies in bfloat16: a multiple of 8.
_ROUTED = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
OWN: dict[str, dict[str, Any]] = {
    "qwen3_moe": _ROUTED,
    "qwen3_5": _HYBRID,
    "qwen3_5_moe": _HYBRID | _ROUTED | {"shared_expert_intermediate_size": 20},
}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": HIDDEN}


@dataclass(frozen=True)
class Twin:
    """One model twice: in PyTorch (float32, CPU), and ours, read from the `folder` that it saved."""

    torch: Any
    module: Any
    params: dict[str, Any]
    folder: Path


def target_twin(
    folder: Path, family: str, seed: int = 0, rope: Mapping[str, Any] | None = None, **changes: Any
) -> Twin:
    """A random target of transformers. changes: fields of its config class."""
    name, suffix = TARGETS[family]
    fields = _target_fields(family, rope, changes)
    model = getattr(transformers, name + "ForCausalLM")(getattr(transformers, name + suffix)(**fields))
    _save(_randomise(model, seed), folder)
    return Twin(model, *read_target(folder), folder)


def vision_twin(folder: Path, family: str, seed: int = 0, **changes: Any) -> Twin:
    """A random target with a vision tower, which text does not go through."""
    name, _ = TARGETS[family]
    fields = _target_fields(family, None, changes)
    tied = fields["tie_word_embeddings"]
    config = getattr(transformers, name + "Config")(
        text_config=fields, vision_config=VISION, tie_word_embeddings=tied
    )
    model = getattr(transformers, name + "ForConditionalGeneration")(config)
    _save(_randomise(model, seed), folder)
    return Twin(model, *read_target(folder), folder)


def draft_twin(
    folder: Path,
    block_size: int = 6,
    taps: Sequence[int] = (0, 1, 2),
    own: Mapping[str, Any] | None = None,
    seed: int = 1,
    **changes: Any,
) -> Twin:
    """A random draft of the PyPI package dflash for targets of SHAPE. own: more of `dflash_config`;
    changes: fields of Qwen3Config, which a draft's config is, or of the draft at its top level."""
    dflash: dict[str, Any] = {
        "block_size": block_size,
        "mask_token_id": 3,
        "target_layer_ids": list(taps),
        **(own or {}),
    }
    fields: dict[str, Any] = SHAPE | {
        "vocab_size": VOCAB,
        "num_hidden_layers": 2,
        "head_dim": 16,
        "rope_parameters": _rope(None),
        "num_target_layers": DEPTH,
        "dflash_config": dflash,
    }
    model = DFlashDraftModel(transformers.Qwen3Config(**fields | changes))
    _save(_randomise(model, seed), folder)
    config = hf.draft_config(folder)
    params = hf.load_draft(folder, config, drafts.abstract_params(config), FLOAT32)
    return Twin(model, drafts.DFlash(config), jax.tree.map(jnp.asarray, params), folder)


def _target_fields(family: str, rope: Mapping[str, Any] | None, changes: Mapping[str, Any]) -> dict[str, Any]:
    own = {"vocab_size": VOCAB, "rope_parameters": _rope(rope), "tie_word_embeddings": False}
    return {**SHAPE, **own, **OWN.get(family, {}), **changes}


def read_target(folder: Path, dtype: Any = FLOAT32) -> tuple[Any, dict[str, Any]]:
    """(module, parameters) of a saved target, by our loaders."""
    config = hf.target_config(folder)
    params = hf.load_target(folder, config, targets.abstract_params(config), dtype)
    return targets.make_target(config), jax.tree.map(jnp.asarray, params)


def _rope(changes: Mapping[str, Any] | None) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1000.0, **(changes or {})}


def _randomise(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Every parameter random: fresh norms are 1 (or the 0 of 1 + w) and fresh biases 0, so a missing one
    would not show; vectors scatter around that. Matrices keep the size of what they multiply, so that no
    layer drowns in the residual stream. Gated delta heads forget in a few to a few hundred tokens."""
    generator = torch.Generator().manual_seed(seed)
    for name, value in model.named_parameters():
        noise = torch.randn(value.shape, generator=generator)
        if name.endswith("A_log"):
            noise = noise - 3.0
        elif value.ndim == 1:
            noise = 0.3 * noise + value.data
        elif "embed_tokens" not in name:
            noise = noise / value.shape[-1] ** 0.5
        value.data.copy_(noise)
    return model.eval()


def _save(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    assert (folder / "model.safetensors").is_file()


# --- PyTorch's side -----------------------------------------------------------------------------------


@torch.inference_mode()
def torch_states(model: Any, tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """(outputs of all decoder layers [T, L*D], logits [T, V]) of one sequence, without a cache.

    Caught by hooks: transformers replaces the last layer's entry of `hidden_states` by the normed one.
    The others must be what `hidden_states[l + 1]` holds, the definition that drafts are trained with.
    """
    caught: list[torch.Tensor] = []

    def catch(_module: Any, _inputs: Any, output: Any) -> None:
        caught.append(output[0] if isinstance(output, tuple) else output)

    decoder = getattr(model.model, "language_model", model.model)
    hooks = [layer.register_forward_hook(catch) for layer in decoder.layers]
    out = model(torch.tensor([list(tokens)]), output_hidden_states=True, use_cache=False)
    for hook in hooks:
        hook.remove()
    assert len(caught) == len(out.hidden_states) - 1
    for layer, state in enumerate(caught[:-1]):
        assert torch.equal(state, out.hidden_states[layer + 1])
    assert not torch.allclose(caught[-1], out.hidden_states[-1])
    return torch.cat(caught, -1)[0].float().numpy(), out.logits[0].float().numpy()


@torch.inference_mode()
def torch_recurrent(model: Any, tokens: Sequence[int]) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """{gated delta layer: (state [Hv, U, W], last inputs of its convolution [width, channels])} after one
    sequence."""
    layers = model(torch.tensor([list(tokens)]), use_cache=True).past_key_values.layers
    return {
        i: (layer.recurrent_states[0][0].numpy(), layer.conv_states[0][0].T.numpy())
        for i, layer in enumerate(layers)
        if hasattr(layer, "recurrent_states")
    }


# --- our side -----------------------------------------------------------------------------------------


@partial(jax.jit, static_argnames=("module", "taps", "logits"))
def forward(
    module: Any,
    params: Any,
    block: Block,
    cache: TargetCache,
    taps: tuple[int, ...] = (),
    logits: Any = "all",
    embeddings: Any = None,
) -> TargetOutput:
    return module.apply({"params": params}, block, cache, taps, logits, embeddings)


committed = jax.jit(commit)


def all_layers(config: TargetConfig) -> tuple[int, ...]:
    return tuple(range(config.num_layers))


def empty_cache(config: TargetConfig, batch: int, slots: int, dtype: Any = FLOAT32) -> TargetCache:
    return target_cache(config, batch, slots, dtype)


def difference(ours: Any, theirs: Any) -> float:
    """Largest absolute difference; NaN counts as infinite."""
    gap = np.abs(np.asarray(ours, np.float64) - np.asarray(theirs, np.float64))
    return float(np.nan_to_num(gap, nan=np.inf).max())
