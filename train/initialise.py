"""A draft that starts as the last layers of its target.

The draft's layers have the target's shape, read the target's states and predict the target's next
tokens, so the target's last layers are a far better start than noise. Two things differ:

* Injected context does not pass through a layer's input norm. The norm's weight g is folded into the
  columns of q, k and v (W' = W diag(g)) and the draft's input norm gets weight 1; the context is
  normalised once, by `hidden_norm`, and `fc` passes the last tap through. So a context row gives the
  keys and values that the target's layer gives for that state.
* The draft normalises queries and keys per head, Llama and Qwen2 do not. With the weight set to the
  typical size (RMS over data) of the target's own rows, scores keep their scale.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from dflash_jax.config import ConfigError, DraftConfig
from dflash_jax.targets import Decoder
from train.step import tapped


def from_target(target: Decoder, target_params: dict, draft: DraftConfig, tokens: Int[Array, "B S"]) -> dict:
    """Draft parameters (float32) from the target's last `draft.num_layers` layers. tokens: ordinary text
    of the target, a few hundred positions, on which the size of queries and keys is measured.

    Raises ConfigError where the shapes differ: such a draft starts from drafts.init_params.
    """
    _check(target, draft)
    first = target.config.num_layers - draft.num_layers
    before = states_before(target, target_params, first, draft.num_layers, tokens)
    params: dict[str, Any] = {
        "fc": {"weight": _pass_last(draft)},
        "hidden_norm": {"weight": np.ones(draft.hidden_size, np.float32)},
        "norm": {"weight": _float(target_params["norm"]["weight"])},
    }
    for i in range(draft.num_layers):
        layer = target_params[f"layers_{first + i}"]
        params[f"layers_{i}"] = _layer(target, layer, before[i], draft)
    return params


def _check(target: Decoder, draft: DraftConfig) -> None:
    c = target.config
    if c.recurrent is not None or (c.moe is not None and any(c.moe.layers[-draft.num_layers :])):
        raise ConfigError(
            f"a draft has no layers like the target's last {draft.num_layers} ({c.family}: gated or routed), so they "
            "cannot be copied: set model.start to random"
        )
    for field in ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size"):
        if getattr(c, field) != getattr(draft, field):
            raise ConfigError(
                f"draft {field} is {getattr(draft, field)}, the target's is {getattr(c, field)}: layers can "
                "be copied only where the shapes are equal"
            )
    if c.attention_bias != draft.attention_bias or c.attention_out_bias != draft.attention_bias or c.mlp_bias:
        raise ConfigError("draft and target differ in biases: layers can be copied only where these agree")
    if draft.num_layers > c.num_layers:
        raise ConfigError(f"the target has {c.num_layers} layers, fewer than the draft's {draft.num_layers}")


def states_before(
    target: Decoder, target_params: dict, first: int, count: int, tokens: Int[Array, "B S"]
) -> list[np.ndarray]:
    """The residual stream that enters layers first .. first + count - 1."""
    tokens = jnp.asarray(tokens, jnp.int32)
    taps = tuple(max(first + i - 1, 0) for i in range(count))
    states = np.split(_float(tapped(target, target_params, tokens, taps)), count, axis=-1)
    if first == 0:
        states[0] = _float(target_params["embed_tokens"]["weight"])[np.asarray(tokens)]
    return states


def _layer(target: Decoder, layer: dict, entering: np.ndarray, draft: DraftConfig) -> dict:
    gain = _float(layer["input_layernorm"]["weight"])
    attention: dict[str, Any] = {}
    for name in ("q_proj", "k_proj", "v_proj"):
        attention[name] = {key: _float(value) for key, value in layer["self_attn"][name].items()}
        attention[name]["weight"] = attention[name]["weight"] * gain
    attention["o_proj"] = {key: _float(value) for key, value in layer["self_attn"]["o_proj"].items()}
    mean_square = np.mean(np.square(entering), axis=-1, keepdims=True)
    normed = entering / np.sqrt(mean_square + target.config.rms_norm_eps)  # the gain is in the weights
    for norm, projection in (("q_norm", "q_proj"), ("k_norm", "k_proj")):
        if norm in layer["self_attn"]:
            attention[norm] = {"weight": _float(layer["self_attn"][norm]["weight"])}
            continue
        rows = normed @ attention[projection]["weight"].T + attention[projection].get("bias", 0.0)
        size = np.sqrt(np.mean(np.square(rows)))
        attention[norm] = {"weight": np.full(draft.head_dim, size, np.float32)}
    return {
        "self_attn": attention,
        "mlp": {
            name: {key: _float(value) for key, value in layer["mlp"][name].items()}
            for name in ("gate_proj", "up_proj", "down_proj")
        },
        "input_layernorm": {"weight": np.ones(draft.hidden_size, np.float32)},
        "post_attention_layernorm": {"weight": _float(layer["post_attention_layernorm"]["weight"])},
    }


def _pass_last(draft: DraftConfig) -> np.ndarray:
    """fc [D, P*D] that gives the last tap (the deepest, the nearest to what the copied layers read)."""
    weight = np.zeros((draft.hidden_size, len(draft.taps) * draft.hidden_size), np.float32)
    weight[:, -draft.hidden_size :] = np.eye(draft.hidden_size, dtype=np.float32)
    return weight


def _float(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float32)
