"""The models once more, in NumPy and float64: whole sequences, dense masks, one row, no cache.

Written from the definitions (transformers' modeling files and rope utilities, DFlash 3.1-3.3) with loops
where the library has tensors. A check against this needs no torch; tests/parity compares with torch.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

from dflash_jax.config import DraftConfig, MoeConfig, RopeConfig, TargetConfig


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


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def mlp(p: dict, x: np.ndarray) -> np.ndarray:
    gate = linear(p["gate_proj"], x)
    return linear(p["down_proj"], gate * sigmoid(gate) * linear(p["up_proj"], x))


def routed(config: MoeConfig, p: dict, x: np.ndarray) -> np.ndarray:
    """A token at a time: its heaviest experts, each as a dense MLP, and the one that all tokens share."""
    out = []
    for token in x:
        probs = softmax(linear(p["gate"], token))
        chosen = np.argsort(-probs)[: config.per_token]
        total = probs[chosen].sum() if config.normalise else 1.0
        y = np.zeros(len(token))
        for e in chosen:
            gate, up = np.split(p["experts"]["gate_up_proj"][e], 2)
            parts = {"gate_proj": gate, "up_proj": up, "down_proj": p["experts"]["down_proj"][e]}
            expert = {name: {"weight": weight} for name, weight in parts.items()}
            y = y + probs[e] / total * mlp(expert, token)
        if "shared_expert" in p:
            y = y + sigmoid(linear(p["shared_expert_gate"], token)) * mlp(p["shared_expert"], token)
        out.append(y)
    return np.array(out)


def _heads(
    p: dict, name: str, x: np.ndarray, positions: np.ndarray, config: TargetConfig | DraftConfig
) -> np.ndarray:
    """One projection [T, heads, H], normalised and turned where its model does that."""
    y = linear(p[f"{name}_proj"], x)
    y = y.reshape(len(x), -1, config.head_dim)
    if f"{name}_norm" in p:
        y = rms_norm(y, p[f"{name}_norm"]["weight"], config.rms_norm_eps)
    return y if name == "v" else rotate(y, positions, config.rope)


# --- Qwen3.5 ------------------------------------------------------------------------------------------


def delta_rule(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, beta: np.ndarray, s: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """One head, a step at a time: q, k [T, U], v [T, W], g, beta [T], s [U, W] -> outputs [T, W] and the
    states after each step [T, U, W]."""
    q = q / np.sqrt((q**2).sum(-1, keepdims=True) + 1e-6) / math.sqrt(q.shape[-1])
    k = k / np.sqrt((k**2).sum(-1, keepdims=True) + 1e-6)
    states = []
    for t in range(len(v)):
        s = np.exp(g[t]) * s
        s = s + np.outer(k[t], beta[t] * (v[t] - s.T @ k[t]))
        states.append(s)
    return np.einsum("tu,tuw->tw", q, np.array(states)), np.array(states)


def delta_layer(config: TargetConfig, p: dict, x: np.ndarray) -> np.ndarray:
    """A gated delta layer over a whole sequence [T, D]."""
    r = config.recurrent
    assert r is not None
    mixed = np.concatenate([np.zeros((r.conv_width - 1, r.channels)), linear(p["in_proj_qkv"], x)])
    mixed = np.array([
        (mixed[t : t + r.conv_width].T * p["conv1d"]["weight"][:, 0]).sum(-1) for t in range(len(x))
    ])  # fmt: skip
    mixed = mixed * sigmoid(mixed)
    keys = r.key_heads * r.key_dim
    q, k = (
        part.reshape(len(x), r.key_heads, r.key_dim) for part in (mixed[:, :keys], mixed[:, keys : 2 * keys])
    )
    v, z = (
        part.reshape(len(x), r.value_heads, -1) for part in (mixed[:, 2 * keys :], linear(p["in_proj_z"], x))
    )
    g = -np.exp(p["A_log"]) * np.log1p(np.exp(linear(p["in_proj_a"], x) + p["dt_bias"]))
    beta = sigmoid(linear(p["in_proj_b"], x))
    out = []
    for h in range(r.value_heads):
        source, empty = h * r.key_heads // r.value_heads, np.zeros((r.key_dim, r.value_dim))
        o, _ = delta_rule(q[:, source], k[:, source], v[:, h], g[:, h], beta[:, h], empty)
        normed = rms_norm(o, p["norm"]["weight"], config.rms_norm_eps)
        out.append(normed * z[:, h] * sigmoid(z[:, h]))
    return linear(p["out_proj"], np.concatenate(out, axis=-1))


def gated_attention(
    config: TargetConfig, p: dict, x: np.ndarray, positions: np.ndarray, seen: np.ndarray
) -> np.ndarray:
    """Full attention of Qwen3.5 over a whole sequence [T, D]."""
    size, turning = config.head_dim, config.rotary_dim
    both = linear(p["q_proj"], x).reshape(len(x), -1, 2 * size)
    k, v = (linear(p[f"{name}_proj"], x).reshape(len(x), -1, size) for name in "kv")

    def placed(y: np.ndarray, weight: np.ndarray) -> np.ndarray:
        y = rms_norm(y, 1 + weight, config.rms_norm_eps)
        return np.concatenate([rotate(y[..., :turning], positions, config.rope), y[..., turning:]], axis=-1)

    q, k = placed(both[..., :size], p["q_norm"]["weight"]), placed(k, p["k_norm"]["weight"])
    gate = sigmoid(both[..., size:]).reshape(len(x), -1)
    return linear(p["o_proj"], attention(q, k, v, seen) * gate)


# --- models -------------------------------------------------------------------------------------------


def target(
    config: TargetConfig,
    params: dict,
    tokens: list[int],
    positions: np.ndarray | None = None,
    mask: np.ndarray | None = None,
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Logits [T, V] and the residual stream after each layer. mask [T, T] and positions default to one
    sequence, the only ones for a hybrid target; a sliding layer's window cuts the mask by positions."""
    p = float64(params)
    steps = np.arange(len(tokens))
    positions = steps if positions is None else positions
    mask = steps[:, None] >= steps[None, :] if mask is None else mask
    x = p["embed_tokens"]["weight"][np.asarray(tokens)]
    hybrid = config.recurrent is not None

    def norm(x: np.ndarray, p: dict) -> np.ndarray:
        return rms_norm(x, p["weight"] + hybrid, config.rms_norm_eps)

    after = []
    for i in range(config.num_layers):
        layer, seen = p[f"layers_{i}"], mask
        if config.window(i) is not None:
            seen = mask & (positions[:, None] - positions[None, :] < config.window(i))
        h = norm(x, layer["input_layernorm"])
        if "linear_attn" in layer:
            x = x + delta_layer(config, layer["linear_attn"], h)
        elif hybrid:
            x = x + gated_attention(config, layer["self_attn"], h, positions, seen)
        else:
            q, k, v = (_heads(layer["self_attn"], name, h, positions, config) for name in "qkv")
            x = x + linear(layer["self_attn"]["o_proj"], attention(q, k, v, seen))
        h = norm(x, layer["post_attention_layernorm"])
        if config.moe is not None and "experts" in layer["mlp"]:
            x = x + routed(config.moe, layer["mlp"], h)
        else:
            x = x + mlp(layer["mlp"], h)
        after.append(x)
    return head(config, p, norm(x, p["norm"])), after


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
