"""Frozen descriptions of models. A config is a static argument of every compiled program,
so it is hashable (tuples, never lists) and complete: nothing is guessed later.

Shapes use one key everywhere: B batch rows, C draft block size, T rows of one forward, S cache
positions, L layers, D hidden size, V vocabulary rows, N query heads, K key/value heads, H head
size, P tapped layers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass
from typing import Any

FULL = "full_attention"
SLIDING = "sliding_attention"
RECURRENT = "linear_attention"  # Hugging Face's name for gated delta layers
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class ConfigError(ValueError):
    """A file or an option that cannot be used: one sentence that says what to do."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding, as transformers 5 defines the four types.

    theta: base of the geometric frequencies. factor: length extension (linear, llama3, yarn).
    original_max_positions: context length before extension (llama3, yarn).
    attention_factor, mscale, mscale_all_dim: yarn's scale of cos and sin, None when absent.
    divisors: llama3 scaling as GGUF stores it (`rope_freqs`), one per frequency; empty when absent.
    """

    theta: float
    type: str = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    divisors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _require(self.theta > 0, f"rope theta is {self.theta}: it must be positive")
        _require(
            self.type in ROPE_TYPES,
            f"rope type '{self.type}' is not supported: one of {', '.join(ROPE_TYPES)}",
        )
        _require(self.factor > 0, f"rope factor is {self.factor}: it must be positive")
        if self.type in ("llama3", "yarn"):
            _require(
                self.original_max_positions > 0,
                f"rope type '{self.type}' needs original_max_position_embeddings",
            )


def _check_positive(config: object, what: str, fields: tuple[str, ...]) -> None:
    for field in fields:
        value = getattr(config, field)
        _require(value > 0, f"{what} {field} is {value}: it must be positive")


def _check_shape(config: TargetConfig | DraftConfig, what: str, kinds: tuple[str, ...]) -> None:
    sizes = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size")
    _check_positive(config, what, (*sizes, "intermediate_size"))
    _require(
        config.num_heads % config.num_kv_heads == 0,
        f"{what} has {config.num_heads} query heads over {config.num_kv_heads} key/value heads: "
        "not a multiple",
    )
    _require(config.head_dim % 2 == 0, f"{what} head_dim is {config.head_dim}: rope needs an even one")
    _require(
        len(config.layer_types) == config.num_layers,
        f"{what} names {len(config.layer_types)} layer types for {config.num_layers} layers",
    )
    for kind in config.layer_types:
        _require(kind in kinds, f"{what} layer type '{kind}' is not supported")


@dataclass(frozen=True)
class RecurrentConfig:
    """The gated delta layers of a hybrid target (arXiv 2412.06464; Qwen3.5).

    key_heads, key_dim: of queries and keys. value_heads: a multiple of key_heads; value head h reads key
    head h // (value_heads / key_heads). conv_width: taps of the causal convolution over q, k and v.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int = 4

    def __post_init__(self) -> None:
        sizes = ("key_heads", "value_heads", "key_dim", "value_dim")
        _check_positive(self, "gated delta layers:", sizes)
        _require(
            self.value_heads % self.key_heads == 0,
            f"gated delta layers have {self.value_heads} value heads over {self.key_heads} key heads: "
            "not a multiple",
        )
        _require(self.conv_width >= 2, f"gated delta layers: conv_width is {self.conv_width}: at least 2")

    @property
    def channels(self) -> int:
        """Width of the convolution: queries, keys and values side by side."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True)
class MoeConfig:
    """Routed experts in place of a layer's MLP.

    per_token: experts that a token uses. intermediate_size: of one expert. shared_intermediate_size: of
    the expert that every token uses (0: none). normalise: the weights of a token's experts sum to 1.
    layers: which layers are routed; the others have the dense MLP.
    """

    experts: int
    per_token: int
    intermediate_size: int
    layers: tuple[bool, ...]
    shared_intermediate_size: int = 0
    normalise: bool = True

    def __post_init__(self) -> None:
        _check_positive(self, "mixture of experts:", ("experts", "per_token", "intermediate_size"))
        _require(
            self.per_token <= self.experts,
            f"mixture of experts: {self.per_token} experts per token of {self.experts}",
        )


@dataclass(frozen=True)
class TargetConfig:
    """A target model. `family` picks the module (dflash_jax.targets.FAMILIES).

    layer_types: one of FULL, SLIDING, RECURRENT per layer; at least one layer has attention.
    sliding_window: positions a SLIDING layer sees (key visible iff query - key < window), None when no
    layer has one. rotary_dim: leading dimensions of a head that rotate (default: all).
    attention_bias: biases on q, k and v; attention_out_bias on o; mlp_bias on gate, up and down.
    recurrent: the shape of RECURRENT layers; moe: of routed MLPs; None where there are none.
    """

    family: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rope: RopeConfig
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None
    max_positions: int = 0
    rotary_dim: int = 0
    recurrent: RecurrentConfig | None = None
    moe: MoeConfig | None = None

    def __post_init__(self) -> None:
        if not self.layer_types:
            object.__setattr__(self, "layer_types", (FULL,) * self.num_layers)
        if not self.rotary_dim:
            object.__setattr__(self, "rotary_dim", self.head_dim)
        _check_shape(self, f"target ({self.family})", (FULL, SLIDING, RECURRENT))
        _require(
            self.rotary_dim % 2 == 0 and 0 < self.rotary_dim <= self.head_dim,
            f"target rotary_dim is {self.rotary_dim}: an even part of the {self.head_dim} of a head is needed",
        )
        _require(
            set(self.layer_types) != {RECURRENT}, "target has no attention layer: at least one is needed"
        )
        if RECURRENT in self.layer_types:
            _require(self.recurrent is not None, "target has linear_attention layers of no stated shape")
        if self.moe is not None:
            _require(
                len(self.moe.layers) == self.num_layers,
                f"target says of {len(self.moe.layers)} layers whether they are routed, it has {self.num_layers}",
            )
        if SLIDING in self.layer_types:
            _require(bool(self.sliding_window), "target has sliding layers but no sliding_window")

    def window(self, layer: int) -> int | None:
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    def hash(self) -> str:
        """sha256 of the architectural fields, equal for the Hugging Face and GGUF forms of one
        model. Rope scaling is left out: GGUF stores it as divisors, which do not determine it."""
        fields = self.fields()
        fields["rope"] = {"theta": self.rope.theta}
        fields["rms_norm_eps"] = float(f"{self.rms_norm_eps:.6g}")
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()

    def fields(self) -> dict[str, Any]:
        """What makes the model, without how far it may go. What a model does not have is left out, so that dense
        models keep the digests of earlier versions."""
        fields = dataclasses.asdict(self)
        fields.pop("max_positions")
        if self.rotary_dim == self.head_dim:
            fields.pop("rotary_dim")
        return {key: value for key, value in fields.items() if value is not None or key == "sliding_window"}


@dataclass(frozen=True)
class Training:
    """How a draft was trained: carried in the files for the reader, ignored when decoding."""

    loss_decay: float | None = None
    num_anchors: int | None = None
    target_name: str | None = None
    target_hash: str | None = None


@dataclass(frozen=True)
class DraftConfig:
    """A DFlash draft (paper 3.1-3.3). It owns no embedding and no head: both are the target's.

    block_size: C it was trained with; a smaller one may be used, a larger one not.
    taps: 0-based target layers whose outputs are its context features, in order.
    num_target_layers, vocab_size: depth and embedding rows of the target it belongs to.
    causal: per layer, whether a block row sees only earlier rows. False is the paper's draft.
    embedding_scale multiplies the block's embeddings; logit_scale, then softcap, act on logits.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rope: RopeConfig
    block_size: int
    mask_token_id: int
    taps: tuple[int, ...]
    num_target_layers: int
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    layer_types: tuple[str, ...] = ()
    causal: tuple[bool, ...] = ()
    sliding_window: int | None = None
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    softcap: float = 0.0
    max_positions: int = 0
    training: Training = Training()

    def __post_init__(self) -> None:
        if not self.layer_types:
            object.__setattr__(self, "layer_types", (FULL,) * self.num_layers)
        if not self.causal:
            object.__setattr__(self, "causal", tuple(kind == SLIDING for kind in self.layer_types))
        _check_shape(self, "draft", (FULL, SLIDING))
        _require(
            len(self.causal) == self.num_layers,
            f"draft names causality for {len(self.causal)} of {self.num_layers} layers",
        )
        _require(self.block_size >= 2, f"draft block_size is {self.block_size}: it must be at least 2")
        _require(bool(self.taps), "draft names no target layers (target_layer_ids)")
        for tap in self.taps:
            _require(
                0 <= tap < self.num_target_layers,
                f"draft taps target layer {tap}, but the target has {self.num_target_layers} layers",
            )
        _require(
            0 <= self.mask_token_id < self.vocab_size,
            f"draft mask_token_id is {self.mask_token_id}, outside the {self.vocab_size} embedding rows",
        )

    def window(self, layer: int) -> int | None:
        return self.sliding_window if self.layer_types[layer] == SLIDING else None


def default_taps(num_target_layers: int, count: int) -> tuple[int, ...]:
    """The reference's choice of `count` target layers (z-lab `build_target_layer_ids`)."""
    if count == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (count - 1)) for i in range(count))


def luce_taps(num_target_layers: int, count: int) -> tuple[int, ...]:
    """Luce's choice, which its files leave to the reader: whole steps from layer 1."""
    step = (num_target_layers - 2) // max(count - 1, 1)
    return tuple(1 + i * step for i in range(count))


# Which layers of a draft may be said to be causal: SLIDING ones are by the model's definition.
CAUSAL = {"all": (FULL, SLIDING), "none": (), "sliding": (SLIDING,)}


@dataclass(frozen=True)
class Overrides:
    """What a user knows better than a draft's file; None: the file is right. causal: a key of CAUSAL."""

    rope_theta: float | None = None
    causal: str | None = None

    def __post_init__(self) -> None:
        _require(
            self.rope_theta is None or 0 < self.rope_theta < math.inf,
            f"--rope-theta is {self.rope_theta}: it must be positive and finite",
        )
        _require(
            self.causal is None or self.causal in CAUSAL,
            f"--draft-causal is '{self.causal}': one of {', '.join(CAUSAL)} is possible",
        )

    def apply(self, config: DraftConfig) -> DraftConfig:
        if self.rope_theta is not None:
            rope = dataclasses.replace(config.rope, theta=self.rope_theta)
            config = dataclasses.replace(config, rope=rope)
        if self.causal is not None:
            causal = tuple(kind in CAUSAL[self.causal] for kind in config.layer_types)
            config = dataclasses.replace(config, causal=causal)
        return config


def check_pair(target: TargetConfig, draft: DraftConfig) -> None:
    """Refuse a draft that belongs to another target. Needs no weights: call it before loading them."""
    facts = (
        ("hidden size", target.hidden_size, draft.hidden_size),
        ("vocabulary (embedding rows)", target.vocab_size, draft.vocab_size),
        ("depth", target.num_layers, draft.num_target_layers),
    )
    wrong = [f"its {what} is {needs}, this target's is {has}" for what, has, needs in facts if has != needs]
    _require(not wrong, "the draft belongs to another target: " + "; ".join(wrong))


def check_block_size(draft: DraftConfig, block_size: int) -> None:
    """A block smaller than the trained one may be used; a larger one degrades every position."""
    _require(
        2 <= block_size <= draft.block_size,
        f"block size {block_size} cannot be used: the draft was trained with {draft.block_size}, "
        f"so 2 to {draft.block_size} can",
    )
