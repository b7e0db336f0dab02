"""Shapes of published models, for those who want their speed without their weights."""

from __future__ import annotations

from dflash_jax.config import FULL, RECURRENT, MoeConfig, RecurrentConfig, RopeConfig, TargetConfig

_QWEN3_VOCAB, _QWEN35_VOCAB = 151936, 248320


def _qwen3(hidden: int, inner: int, tied: bool) -> TargetConfig:
    return TargetConfig(
        family="qwen3", hidden_size=hidden, num_layers=36, num_heads=32, num_kv_heads=8, head_dim=128,
        intermediate_size=inner, vocab_size=_QWEN3_VOCAB, rope=RopeConfig(1e6), tie_word_embeddings=tied,
        max_positions=40960,
    )  # fmt: skip


def _llama(
    hidden: int, layers: int, heads: int, kv: int, inner: int, vocab: int, theta: float, tied: bool
) -> TargetConfig:
    return TargetConfig(
        family="llama", hidden_size=hidden, num_layers=layers, num_heads=heads, num_kv_heads=kv,
        head_dim=hidden // heads, intermediate_size=inner, vocab_size=vocab, rope=RopeConfig(theta),
        rms_norm_eps=1e-5, tie_word_embeddings=tied, max_positions=8192,
    )  # fmt: skip


def _qwen35(
    hidden: int, layers: int, inner: int, heads: int, kv: int, value_heads: int,
    tied: bool = False, moe: MoeConfig | None = None,
) -> TargetConfig:  # fmt: skip
    """Attention in every fourth layer, gated delta layers between."""
    return TargetConfig(
        family="qwen3_5" if moe is None else "qwen3_5_moe", hidden_size=hidden, num_layers=layers,
        num_heads=heads, num_kv_heads=kv, head_dim=256, intermediate_size=inner, vocab_size=_QWEN35_VOCAB,
        rope=RopeConfig(1e7), rotary_dim=64, tie_word_embeddings=tied, max_positions=262144,
        layer_types=tuple(FULL if i % 4 == 3 else RECURRENT for i in range(layers)),
        recurrent=RecurrentConfig(key_heads=16, value_heads=value_heads, key_dim=128, value_dim=128),
        moe=moe,
    )  # fmt: skip


SHAPES = {
    "smollm2-135m": _llama(576, 30, 9, 3, 1536, 49152, 1e5, tied=True),
    "llama-3.1-8b": _llama(4096, 32, 32, 8, 14336, 128256, 5e5, tied=False),
    "qwen3-4b": _qwen3(2560, 9728, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, tied=False),
    "qwen3-30b-a3b": TargetConfig(
        family="qwen3_moe", hidden_size=2048, num_layers=48, num_heads=32, num_kv_heads=4, head_dim=128,
        intermediate_size=6144, vocab_size=_QWEN3_VOCAB, rope=RopeConfig(1e6), max_positions=40960,
        moe=MoeConfig(128, 8, 768, (True,) * 48),
    ),
    "qwen3.5-4b": _qwen35(2560, 32, 9216, 16, 4, 32, tied=True),
    "qwen3.5-9b": _qwen35(4096, 32, 12288, 16, 4, 32),
    "qwen3.5-27b": _qwen35(5120, 64, 17408, 24, 4, 48),
    "qwen3.5-35b-a3b": _qwen35(2048, 40, 512, 16, 2, 32, moe=MoeConfig(256, 8, 512, (True,) * 40, 512)),
}  # fmt: skip
