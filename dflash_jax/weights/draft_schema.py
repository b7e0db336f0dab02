"""The metadata of a draft in GGUF: one table, from which files are read and written and the table of
docs/formats.md is made.

Four families of files exist. `A` stands for the family's architecture string.

    upstream    llama.cpp since June 2026: taps are stored as id + 1
    pre-merge   the same architecture before that: taps as they are, and other names
    Luce        lucebox: early files leave the taps to the reader
    community   forks of llama.cpp

Sources: llama.cpp `src/models/dflash.cpp`, `conversion/qwen.py`; lucebox-hub `draft_gguf_loader.cpp`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_jax.config import FULL, SLIDING, ConfigError, DraftConfig
from dflash_jax.weights import gguf_rope
from dflash_jax.weights.fields import MAX_INTEGER, MAX_LAYERS, Fields
from dflash_jax.weights.gguf_file import GGUFFile
from dflash_jax.weights.names import Names, draft_gguf

# Bounds of a block; a damaged file may claim 2**31 rows.
_MAX_BLOCK = 4096


@dataclass(frozen=True)
class Family:
    """writer: who writes such files. names: of its tensors. shift: what is added to a tap in the file.
    block_size: where the file names none, as the family's own reader has it; None: it must."""

    name: str
    writer: str
    architecture: str
    names: Names
    shift: int = 0
    block_size: int | None = None


UPSTREAM = Family(
    "upstream",
    "llama.cpp",
    "dflash",
    draft_gguf("fc", "enc.output_norm", "ffn_norm"),
    shift=1,
    block_size=16,
)
PRE_MERGE = Family(
    "pre-merge",
    "llama.cpp before the merge",
    "dflash",
    draft_gguf("fc", "hidden_norm", "ffn_norm"),
    block_size=16,
)
LUCE = Family(
    "Luce", "Luce", "qwen35-dflash-draft", draft_gguf("dflash.fc", "dflash.hidden_norm", "ffn_norm")
)
COMMUNITY = Family(
    "community",
    "community converters",
    "dflash-draft",
    draft_gguf("dflash_fc", "dflash_hidden_norm", "post_attention_norm"),
)
FAMILIES = (UPSTREAM, PRE_MERGE, LUCE, COMMUNITY)


@dataclass(frozen=True)
class Row:
    """One fact about a draft.

    field: what `record` calls it. kind: a key of KINDS. config: where config.json has it. meaning: for people.
    keys: in the order of FAMILIES, or one for all; "" where a family has none. need: a file without it cannot
    be used. derived: follows from other rows, so that a family may lack it.
    """

    field: str
    kind: str
    keys: tuple[str, ...]
    config: str
    meaning: str
    need: bool = False
    derived: bool = False

    def key(self, family: Family) -> str:
        key = self.keys[FAMILIES.index(family) if len(self.keys) > 1 else 0]
        return key.replace("{A}", family.architecture)


def _shared(field: str, kind: str, key: str, config: str, meaning: str, **more: bool) -> Row:
    return Row(field, kind, ("{A}." + key,), config, meaning, **more)


def _llama(field: str, key: str, config: str, meaning: str) -> Row:
    """A float that llama.cpp alone has."""
    return Row(field, "f32", ("{A}." + key, "{A}." + key, "", ""), config, meaning)


def _training(field: str, kind: str, config: str, meaning: str) -> Row:
    return Row(field, kind, ("dflash.training." + field.removeprefix("training."),), config, meaning)


_ROPE = "rope_parameters"
_OWN = "dflash_config"
_D = "{A}.dflash."
ROWS = (
    _shared("num_layers", "u32", "block_count", "num_hidden_layers", "draft layers", need=True),
    _shared("hidden_size", "u32", "embedding_length", "hidden_size", "D, the target's too", need=True),
    _shared("intermediate_size", "u32", "feed_forward_length", "intermediate_size", "width of the MLP", need=True),
    _shared("max_positions", "u32", "context_length", "max_position_embeddings", "context it was made for"),
    _shared("num_heads", "u32", "attention.head_count", "num_attention_heads", "query heads", need=True),
    _shared("num_kv_heads", "u32", "attention.head_count_kv", "num_key_value_heads", "key/value heads", need=True),
    _shared("head_dim", "u32", "attention.key_length", "head_dim", "size of a head", need=True),
    _shared("value_dim", "u32", "attention.value_length", "head_dim", "the same", derived=True),
    _shared(
        "rms_norm_eps", "f32", "attention.layer_norm_rms_epsilon", "rms_norm_eps", "epsilon of all norms", need=True
    ),
    _shared("sliding_window", "u32", "attention.sliding_window", "sliding_window", "positions a sliding layer sees"),
    _shared("sliding", "bool[]", "attention.sliding_window_pattern", "layer_types", "which layers slide"),
    _shared(
        "causal", "bool", "attention.causal", "is_causal", "of all layers; absent: sliding layers are causal"
    ),
    _shared("rope.freq_base", "f32", "rope.freq_base", f"{_ROPE}.rope_theta", "base of the frequencies", need=True),
    _shared("rope.dimension_count", "u32", "rope.dimension_count", "", "all of a head rotates", derived=True),
    _shared("rope.dimension_sections", "i32[]", "rope.dimension_sections", "", "only H/2, 0, 0, 0: plain RoPE"),
    _shared("rope.scaling.type", "string", "rope.scaling.type", f"{_ROPE}.rope_type", "none, linear or yarn"),
    _shared("rope.scaling.factor", "f32", "rope.scaling.factor", f"{_ROPE}.factor", "extension of the context"),
    _shared(
        "rope.scaling.original_context_length", "u32", "rope.scaling.original_context_length",
        f"{_ROPE}.original_max_position_embeddings", "yarn: context before it",
    ),
    _shared("rope.scaling.attn_factor", "f32", "rope.scaling.attn_factor", "", "yarn: times its own scale"),
    _shared(
        "rope.scaling.yarn_attn_factor", "f32", "rope.scaling.yarn_attn_factor", f"{_ROPE}.attention_factor",
        "yarn: scale of cos and sin",
    ),
    _shared(
        "rope.scaling.yarn_beta_fast", "f32", "rope.scaling.yarn_beta_fast", f"{_ROPE}.beta_fast", "yarn: default 32"
    ),
    _shared(
        "rope.scaling.yarn_beta_slow", "f32", "rope.scaling.yarn_beta_slow", f"{_ROPE}.beta_slow", "yarn: default 1"
    ),
    _shared("rope.scaling.yarn_ext_factor", "f32", "rope.scaling.yarn_ext_factor", "", "yarn: only 1"),
    _shared("rope.scaling.yarn_log_multiplier", "f32", "rope.scaling.yarn_log_multiplier", "", "yarn: only 0"),
    _shared("vocab_size", "u32", "vocab_size", "vocab_size", "embedding rows of the target", derived=True),
    Row(
        "block_size", "u32", ("{A}.block_size", "{A}.block_size", _D + "block_size", _D + "block_size"),
        f"{_OWN}.block_size", "rows of a block in training, anchor included",
    ),
    Row(
        "mask_token_id", "u32",
        ("tokenizer.ggml.mask_token_id", "{A}.mask_token_id", _D + "mask_token_id", _D + "mask_token_id"),
        f"{_OWN}.mask_token_id", "token that stands for 'unknown yet'", need=True,
    ),
    Row(
        "taps", "i32[]",
        ("{A}.target_layers", "{A}.target_layers", _D + "target_layer_ids", _D + "target_layer_ids"),
        f"{_OWN}.target_layer_ids", "target layers whose outputs are read; **upstream stores id + 1**",
    ),
    Row("num_taps", "u32", ("", "", _D + "n_target_layers", ""), "", "how many taps", derived=True),
    Row("num_features", "u32", ("", "", "", _D + "n_target_features"), "", "taps times D", derived=True),
    _llama("embedding_scale", "embedding_scale", "input_embedding_scale", "times the block's embeddings"),
    _llama("logit_scale", "logit_scale", "output_multiplier", "times the logits"),
    _llama("softcap", "final_logit_softcapping", "final_logit_softcapping", "then c tanh(logits / c)"),
    _training("num_target_layers", "u32", "num_target_layers", "depth of the target"),
    _training("training.loss_decay", "f32", f"{_OWN}.training.loss_decay", "gamma of the decayed loss"),
    _training("training.num_anchors", "u32", f"{_OWN}.training.num_anchors", "blocks a sequence"),
    _training("training.target_name", "string", f"{_OWN}.training.target_name", "what it was trained for"),
    _training("training.target_hash", "string", f"{_OWN}.training.target_hash", "sha256 of that target's shape"),
)  # fmt: skip


# --- reading ------------------------------------------------------------------------------------------


def _array(fields: Fields, key: str, kind: type, what: str) -> np.ndarray:
    values = fields.get(key)
    if not isinstance(values, np.ndarray) or not np.issubdtype(values.dtype, kind):
        raise fields.error(key, f"must be an array of {what}")
    if len(values) > MAX_LAYERS:
        raise fields.error(key, f"holds {len(values)} {what}: no model has so many layers")
    return values


def _integers(fields: Fields, key: str, _: int) -> tuple[int, ...]:
    return tuple(int(value) for value in _array(fields, key, np.integer, "integers"))


def _flags(fields: Fields, key: str, _: int) -> tuple[bool, ...]:
    """One flag alone is of all layers."""
    if isinstance(fields.get(key), bool):
        return (fields.flag(key),)
    return tuple(bool(value) for value in _array(fields, key, np.bool_, "flags"))


_Read = Callable[[Fields, str, int], Any]  # fields, key, largest number that makes sense
_Write = Callable[[Any], Any]
# What a kind is read with, and what gguf_writer takes for it.
KINDS: dict[str, tuple[_Read, _Write]] = {
    "u32": (lambda fields, key, most: fields.integer(key, most=most), int),
    "f32": (lambda fields, key, _: fields.number(key), float),
    "bool": (lambda fields, key, _: fields.flag(key), bool),
    "string": (lambda fields, key, _: fields.text(key), str),
    "i32[]": (_integers, lambda values: np.asarray(values, np.int32)),
    "bool[]": (_flags, lambda values: np.asarray(values, np.bool_)),
}
# Sizes of tensors: no file claims one that its own tensors do not have.
_SIZES = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")


def family_of(file: GGUFFile) -> Family:
    """By the architecture; llama.cpp's two forms by the context norm's name and the mask token's key.

    ConfigError for another architecture, for parts of a split file, and where the two signs contradict: then
    nobody can tell what the taps mean.
    """
    fields = Fields(file.path, file.metadata)
    name = fields.text("general.architecture")
    families = [family for family in FAMILIES if family.architecture == name]
    if not families:
        known = ", ".join(dict.fromkeys(family.architecture for family in FAMILIES))
        raise fields.error("general.architecture", f"is '{name}': drafts can be {known}")
    shards = fields.integer("split.count", 1)
    if shards > 1:
        raise fields.error("split.count", f"is {shards}: join the parts first (llama-gguf-split --merge)")
    if len(families) == 1:
        return families[0]
    # tokenizer.ggml.mask_token_id tells nothing: any tokenizer that was copied may have one
    norm = "hidden_norm.weight"
    old = f"{name}.mask_token_id" in file.metadata or PRE_MERGE.names.to_file(norm) in file.tensors
    if old and UPSTREAM.names.to_file(norm) in file.tensors:
        raise ConfigError(
            f"{file.path}: has names of files from before and after llama.cpp's merge of DFlash, which store "
            "target_layers differently: convert the model again"
        )
    return PRE_MERGE if old else UPSTREAM


def keys(family: Family) -> Iterator[tuple[Row, str]]:
    """The rows that a family has, with their keys."""
    return ((row, key) for row in ROWS if (key := row.key(family)))


def read(file: GGUFFile, family: Family) -> tuple[dict[str, Any], list[str]]:
    """{field: value} of what the file holds, taps as ids; and a sentence for everything that is missing or
    malformed."""
    fields = Fields("", file.metadata)
    widest = max((max(t.shape) for t in file.tensors.values() if len(t.raw)), default=0)
    limits = {
        "num_layers": min(MAX_LAYERS, len(file.tensors)),
        "block_size": _MAX_BLOCK,
        "num_target_layers": MAX_LAYERS,
        "num_taps": MAX_LAYERS,
        **dict.fromkeys(_SIZES, min(MAX_INTEGER, widest)),
    }
    values: dict[str, Any] = {}
    problems: list[str] = []
    for row, key in keys(family):
        if key not in fields:
            if row.need:
                problems.append(f"{key} is missing")
            continue
        try:
            values[row.field] = KINDS[row.kind][0](fields, key, limits.get(row.field, MAX_INTEGER))
        except ConfigError as error:
            problems.append(str(error).removeprefix(": "))
    if "taps" in values:
        values["taps"] = tuple(tap - family.shift for tap in values["taps"])
    return values, problems


def listing(file: GGUFFile, family: Family) -> list[tuple[str, str]]:
    """(key = value, meaning) of the metadata that the table knows, then of the rest that is the model's."""
    known = {key: row.meaning.replace("**", "") for row, key in keys(family)}
    own = (f"{family.architecture}.", "dflash.")
    others = [key for key in file.metadata if key.startswith(own) and key not in known]
    lines = [(f"{key} = {_short(file.metadata[key])}", known[key]) for key in known if key in file.metadata]
    return lines + [(f"{key} = {_short(file.metadata[key])}", "not used") for key in others]


def _short(value: Any) -> str:
    if isinstance(value, (np.ndarray, list)):
        shown = ", ".join(str(item) for item in value[:16])
        return f"[{shown}{', ...' if len(value) > 16 else ''}]"
    return str(value)[:80]


# --- writing ------------------------------------------------------------------------------------------


def record(config: DraftConfig) -> dict[str, Any]:
    """{field: value} of a config; None for what is as by default. ConfigError for what GGUF cannot say."""
    sliding = tuple(kind == SLIDING for kind in config.layer_types)
    if any(sliding) and config.sliding_window is None:
        raise ConfigError("sliding layers without a window have no form in GGUF")
    causal = None
    if config.causal != sliding:
        if len(set(config.causal)) > 1:
            raise ConfigError("draft causality differs between layers of one type: GGUF has one flag for all")
        causal = config.causal[0]
    training = {f"training.{name}": value for name, value in vars(config.training).items()}
    return {
        **{name: getattr(config, name) for name in (*_SIZES, "num_layers", "rms_norm_eps", "vocab_size")},
        **{name: getattr(config, name) for name in ("block_size", "mask_token_id", "taps", "num_target_layers")},
        **gguf_rope.write(config.rope),
        **training,
        "value_dim": config.head_dim,
        "rope.dimension_count": config.head_dim,
        "max_positions": config.max_positions or None,
        "sliding": sliding if any(sliding) else None,
        "sliding_window": config.sliding_window if any(sliding) else None,
        "causal": causal,
        "num_taps": len(config.taps),
        "num_features": len(config.taps) * config.hidden_size,
        "embedding_scale": None if config.embedding_scale == 1.0 else config.embedding_scale,
        "logit_scale": None if config.logit_scale == 1.0 else config.logit_scale,
        "softcap": config.softcap or None,
    }  # fmt: skip


def metadata(config: DraftConfig, family: Family) -> dict[str, Any]:
    """{key: value} for gguf_writer. ConfigError for what the family has no key for."""
    values = record(config)
    values["taps"] = tuple(tap + family.shift for tap in values["taps"])
    written: dict[str, Any] = {}
    for row in ROWS:
        value, key = values.get(row.field), row.key(family)
        if value is None:
            continue
        if key:
            written[key] = KINDS[row.kind][1](value)
        elif not row.derived:
            raise ConfigError(f"{family.name} files have no key for {row.field}, which is {value} here")
    return written


def layer_types(sliding: tuple[bool, ...] | None, layers: int) -> tuple[str, ...]:
    """Of the pattern; a flag alone is of all layers."""
    if sliding is None:
        return (FULL,) * layers
    return tuple(SLIDING if flag else FULL for flag in (sliding * layers if len(sliding) == 1 else sliding))


def table() -> str:
    """The table of docs/formats.md, in Markdown."""
    heads = ("key", "type", "config.json", "meaning")
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in ROWS:
        needed = ", needed" if row.need else ""
        cells = (_cell(row), row.kind, f"`{row.config}`" if row.config else "", row.meaning + needed)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(row: Row) -> str:
    """A key with the families that have it, where they differ."""
    by_key: dict[str, list[str]] = {}
    for family, key in zip(FAMILIES, row.keys * (len(FAMILIES) // len(row.keys)), strict=True):
        by_key.setdefault(key.replace("{A}", "A"), []).append(family.name)
    by_key.pop("", None)
    if len(by_key) == 1 and len(by_key[next(iter(by_key))]) == len(FAMILIES):
        return f"`{next(iter(by_key))}`"
    return "<br>".join(f"`{key}` ({', '.join(names)})" for key, names in by_key.items())
