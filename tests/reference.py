"""The models once more, in NumPy and float64: whole sequences, dense masks, one row, no cache.

Written from the definitions (transformers' modeling files and rope utilities, DFlash 3.1-3.3) with loops
where the library has tensors. A check against this needs no torch; tests/parity compares with torch.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

from dflash_jax.config import DraftConfig, RopeConfig, TargetConfig


def float64(params: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(x, np.float64), params)


# --- rotary positions ---------------------------------------------------------------------------------


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """One frequency at a time, and the factor on cos and sin."""
    plain = [rope.theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    if rope.divisors:
        return np.array([f / d for f, d in zip(plain, rope.divisors, strict=True)]), 1.0
    if rope.type == "linear":
        return np.array([f / rope.factor for f in plain]), 1.0
    if rope.type == "llama3":
        return np.array([_llama3(f, rope) for f in plain]), 1.0
    if rope.type == "yarn":
        return _yarn(plain, rope, head_dim)
    return np.array(plain), 1.0


def _llama3(frequency: float, rope: RopeConfig) -> float:
    wavelength = 2 * math.pi / frequency
    if wavelength < rope.original_max_positions / rope.high_freq_factor:
        return frequency
    if wavelength > rope.original_max_positions / rope.low_freq_factor:
        return frequency / rope.factor
    smooth = (rope.original_max_positions / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    return (1 - smooth) * frequency / rope.factor + smooth * frequency


def _yarn(plain: list[float], rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    def dimension(turns: float) -> float:
        return (
            head_dim
            * math.log(rope.original_max_positions / (turns * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    blended = []
    for i, frequency in enumerate(plain):
        keep = 1 - min(max((i - low) / (high - low), 0), 1)
        blended.append(frequency / rope.factor * (1 - keep) + frequency * keep)

    def scale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1

    if rope.attention_factor is not None:
        factor = rope.attention_factor
    elif rope.mscale and rope.mscale_all_dim:
        factor = scale(rope.mscale) / scale(rope.mscale_all_dim)
    else:
        factor = scale(1)
    return np.array(blended), factor


def rotate(x: np.ndarray, positions: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """x [T, heads, H]: dimension i and i + H/2 are one complex number, turned by its angle."""
    inverse, factor = inverse_frequencies(rope, x.shape[-1])
    half = x.shape[-1] // 2
    number = x[..., :half] + 1j * x[..., half:]
    number = number * factor * np.exp(1j * np.outer(positions, inverse))[:, None, :]
    return np.concatenate([number.real, number.imag], axis=-1)


# --- layers -------------------------------------------------------------------------------------------


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def softmax(x: np.ndarray) -> np.ndarray:
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """q [T, N, H], k and v [S, K, H], mask [T, S] -> [T, N * H]; head n reads key/value head n * K // N."""
    heads = []
    for n in range(q.shape[1]):
        m = n * k.shape[1] // q.shape[1]
        scores = q[:, n] @ k[:, m].T / math.sqrt(q.shape[2])
        heads.append(softmax(np.where(mask, scores, -np.inf)) @ v[:, m])
    return np.concatenate(heads, axis=-1)


def linear(p: dict, x: np.ndarray) -> np.ndarray:
    return x @ p["weight"].T + p.get("bias", 0.0)


def mlp(p: dict, x: np.ndarray) -> np.ndarray:
    gate = linear(p["gate_proj"], x)
    return linear(p["down_proj"], gate / (1 + np.exp(-gate)) * linear(p["up_proj"], x))


def _heads(
    p: dict, name: str, x: np.ndarray, positions: np.ndarray, config: TargetConfig | DraftConfig
) -> np.ndarray:
    """One projection [T, heads, H], normalised and turned where its model does that."""
    y = linear(p[f"{name}_proj"], x)
    y = y.reshape(len(x), -1, config.head_dim)
    if f"{name}_norm" in p:
        y = rms_norm(y, p[f"{name}_norm"]["weight"], config.rms_norm_eps)
    return y if name == "v" else rotate(y, positions, config.rope)


# --- models -------------------------------------------------------------------------------------------


def target(
    config: TargetConfig,
    params: dict,
    tokens: list[int],
    positions: np.ndarray | None = None,
    mask: np.ndarray | None = None,
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Logits [T, V] and the residual stream after each layer. mask [T, T] and positions default to one
    sequence; a sliding layer's window cuts the mask by positions."""
    p = float64(params)
    steps = np.arange(len(tokens))
    positions = steps if positions is None else positions
    mask = steps[:, None] >= steps[None, :] if mask is None else mask
    x = p["embed_tokens"]["weight"][np.asarray(tokens)]
    after = []
    for i in range(config.num_layers):
        layer, seen = p[f"layers_{i}"], mask
        if config.window(i) is not None:
            seen = mask & (positions[:, None] - positions[None, :] < config.window(i))
        h = rms_norm(x, layer["input_layernorm"]["weight"], config.rms_norm_eps)
        q, k, v = (_heads(layer["self_attn"], name, h, positions, config) for name in "qkv")
        x = x + linear(layer["self_attn"]["o_proj"], attention(q, k, v, seen))
        h = rms_norm(x, layer["post_attention_layernorm"]["weight"], config.rms_norm_eps)
        x = x + mlp(layer["mlp"], h)
        after.append(x)
    return head(config, p, rms_norm(x, p["norm"]["weight"], config.rms_norm_eps)), after


def head(config: TargetConfig, params: dict, hidden: np.ndarray) -> np.ndarray:
    table = params["embed_tokens" if config.tie_word_embeddings else "lm_head"]["weight"]
    return hidden @ np.asarray(table, np.float64).T


def features(after: list[np.ndarray], taps: tuple[int, ...]) -> np.ndarray:
    return np.concatenate([after[tap] for tap in taps], axis=-1)


def draft(config: DraftConfig, params: dict, context: np.ndarray, embeddings: np.ndarray) -> np.ndarray:
    """Hidden states [C - 1, D] for the features [S, P * D] of S committed positions and the embeddings
    [C, D] of a block that starts at position S."""
    p = float64(params)
    seen, size = len(context), len(embeddings)
    fused = rms_norm(linear(p["fc"], context), p["hidden_norm"]["weight"], config.rms_norm_eps)
    keys_at, rows_at = np.arange(seen + size), np.arange(seen, seen + size)
    x = embeddings * config.embedding_scale
    for i in range(config.num_layers):
        layer = p[f"layers_{i}"]
        h = rms_norm(x, layer["input_layernorm"]["weight"], config.rms_norm_eps)
        q = _heads(layer["self_attn"], "q", h, rows_at, config)
        both = np.concatenate([fused, h])
        k, v = (_heads(layer["self_attn"], name, both, keys_at, config) for name in "kv")
        y = attention(q, k, v, draft_mask(config, i, seen, size))
        x = x + linear(layer["self_attn"]["o_proj"], y)
        h = rms_norm(x, layer["post_attention_layernorm"]["weight"], config.rms_norm_eps)
        x = x + mlp(layer["mlp"], h)
    return rms_norm(x, p["norm"]["weight"], config.rms_norm_eps)[1:]


def draft_mask(config: DraftConfig, layer: int, seen: int, size: int) -> np.ndarray:
    """[C, S + C], one pair at a time."""
    window, causal = config.window(layer), config.causal[layer]

    def visible(query: int, key: int) -> bool:
        if causal and key > query:
            return False
        if window is None:
            return True
        return query - key < window and (causal or key - query < window)

    return np.array([[visible(seen + i, j) for j in range(seen + size)] for i in range(size)])


# --- sampling -----------------------------------------------------------------------------------------


def filtered(logits: np.ndarray, temperature: float, top_p: float, top_k: int) -> tuple[np.ndarray, float]:
    """Probabilities [V] after temperature, top-k and top-p, by sorting; ties stay or go together. Also
    how close the mass came to top_p where a token was added or not: below rounding, both are right."""
    scaled = np.asarray(logits, np.float64) / temperature
    if 0 < top_k < len(scaled):
        scaled = np.where(scaled >= np.sort(scaled)[-top_k], scaled, -np.inf)
    probs = softmax(scaled)
    if top_p == 1:
        return probs, np.inf
    keep, mass, margin = np.zeros(len(probs), bool), 0.0, np.inf
    for value in sorted(set(scaled[np.isfinite(scaled)]), reverse=True):
        margin = min(margin, abs(mass - top_p))
        if mass < top_p:
            keep |= scaled == value
        mass += probs[scaled == value].sum()
    probs = np.where(keep, probs, 0)
    return probs / probs.sum(), margin
