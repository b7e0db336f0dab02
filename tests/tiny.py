"""Tiny target and draft configs for the tests of training."""

from __future__ import annotations

from typing import Any

from dflash_jax.config import FULL, SLIDING, DraftConfig, RopeConfig, TargetConfig

TARGET = TargetConfig(
    family="llama", hidden_size=32, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=8,
    intermediate_size=48, vocab_size=64, rope=RopeConfig(10000.0), tie_word_embeddings=True,
)  # fmt: skip


def draft_config(**changes: Any) -> DraftConfig:
    fields: dict[str, Any] = {
        "hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
        "intermediate_size": 48, "vocab_size": 64, "rope": RopeConfig(10000.0), "block_size": 4,
        "mask_token_id": 3, "taps": (1, 2), "num_target_layers": 4,
    }  # fmt: skip
    return DraftConfig(**{**fields, **changes})


DRAFT = draft_config()
DRAFTS = {
    "full": DRAFT,
    "causal": draft_config(causal=(True, False)),
    "sliding": draft_config(layer_types=(SLIDING, FULL), sliding_window=5),
    "sliding, bidirectional": draft_config(
        layer_types=(SLIDING, SLIDING), causal=(False, False), sliding_window=3
    ),
    "scaled embeddings": draft_config(embedding_scale=2.5),
}
