"""What a file is, without loading it: family, shapes, taps, mask id, rope, block, memory, problems."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dflash_jax import drafts, targets, tokenizer
from dflash_jax.cache import cache_bytes, trail_bytes
from dflash_jax.config import RECURRENT, ConfigError, DraftConfig, RopeConfig, TargetConfig, check_pair
from dflash_jax.pair import DTYPES, draft_config, target_config, weight_bytes
from dflash_jax.sources import Source, find_draft, find_target
from dflash_jax.weights import gguf, hf
from dflash_jax.weights.schema import ARCHITECTURE, architectures, folder_config

Facts = list[tuple[str, str]]
# What marks a draft of any kind, ours or one that its reader refuses by name.
_DRAFT_KEYS = ("dflash_config", "speculators_model_type", "mask_token_id", "markov_rank")
# Nodes of the verify whose trail is told: the block size of most drafts.
_NODES = 16


def run(name: str, target: str | None) -> int:
    """Print what `name` is. Raises ConfigError with the first problem, after everything else was said."""
    problems: list[str] = []
    belongs_to = target_config(find_target(target).target) if target is not None else None
    found = find_target(name)
    if is_draft(found.target):
        _show(found.target, "draft", problems, lambda: draft_facts(found.target, belongs_to))
    else:
        if belongs_to is not None:
            raise ConfigError(f"{name} is a target: --target checks a draft, so give the draft as PATH")
        _show(found.target, "target", problems, lambda: target_facts(found.target))
        if found.draft is not None:
            draft = find_draft(name)
            own = target_config(found.target)
            _show(draft, "draft", problems, lambda: draft_facts(draft, own))
    if problems:
        raise ConfigError("; ".join(problems))
    return 0


def is_draft(source: Source) -> bool:
    if source.is_gguf:
        return gguf.is_draft(source.path)
    fields = folder_config(source.path)
    names = architectures(fields)
    return ARCHITECTURE in names or any(key in fields for key in _DRAFT_KEYS)


def _show(
    source: Source, role: str, problems: list[str], facts: Callable[[], tuple[Facts, list[str]]]
) -> None:
    print(f"{source.name}: a {role} ({'GGUF file' if source.is_gguf else 'Hugging Face folder'})")
    try:
        known, wrong = facts()
    except ConfigError as error:
        known, wrong = [], [str(error)]
    for key, value in [("path", str(source.path)), *known]:
        print(f"  {key:14}{value}")
    print(f"  {'problems':14}{'none' if not wrong else ''}")
    for problem in wrong:
        print(f"    - {problem}")
    problems += wrong


def target_facts(source: Source) -> tuple[Facts, list[str]]:
    config = target_config(source)
    abstract = targets.abstract_params(config)
    facts: Facts = [("family", config.family), *_shapes(config), *_recurrent(config), *_experts(config)]
    facts.append(("head", "the embedding (tied)" if config.tie_word_embeddings else "its own"))
    facts += _rope_and_length(config.rope, config.max_positions)
    facts += [*_memory(config, abstract), *_trail(config)]
    facts.append(("config hash", config.hash()))
    problems: list[str] = []

    def words() -> None:
        read = (tokenizer.from_gguf if source.is_gguf else tokenizer.from_folder)(source.path)
        stops = ", ".join(f"{id} {read.decode([id], skip_special=False)!r}" for id in read.stop_ids)
        template = "chat template" if read.has_template else "no chat template (use --raw)"
        facts.append(("tokenizer", f"{read.vocab_size} tokens, {template}, stops at {stops or 'nothing'}"))
        if read.vocab_size > config.vocab_size:
            problems.append(
                f"{source.path}: the tokenizer has {read.vocab_size} tokens, the embedding {config.vocab_size}"
            )

    def tensors() -> None:
        if source.repo:
            facts.append(("tensors", "not checked: the weights are still on the hub"))
        elif source.is_gguf:
            gguf.check_target(source.path, config, abstract)
        else:
            hf.check_target(source.path, config, abstract)

    _collect(problems, words, tensors)
    return facts, problems


def draft_facts(source: Source, target: TargetConfig | None) -> tuple[Facts, list[str]]:
    config = draft_config(source)
    abstract = drafts.abstract_params(config)
    facts: Facts = [
        ("block size", f"{config.block_size} (anchor and {config.block_size - 1} candidates)"),
        ("taps", f"layers {', '.join(map(str, config.taps))} of {config.num_target_layers}"),
        ("mask id", str(config.mask_token_id)),
        *_shapes(config),
        ("attention", _attention(config)),
        *_rope_and_length(config.rope, config.max_positions),
        *_memory(config, abstract),
    ]
    extras = {"embedding scale": config.embedding_scale, "logit scale": config.logit_scale}
    facts += [(key, str(value)) for key, value in extras.items() if value != 1.0]
    if config.softcap:
        facts.append(("softcap", str(config.softcap)))
    trained = config.training
    if trained.target_name or trained.target_hash:
        facts.append(("trained for", trained.target_name or trained.target_hash or ""))
    problems: list[str] = []

    def pairing() -> None:
        if target is None:
            facts.append(("fits", "not checked: name a target with --target"))
            return
        check_pair(target, config)
        facts.append(("fits", "the target's hidden size, vocabulary and depth"))
        if trained.target_hash and trained.target_hash != target.hash():
            problems.append(f"{source.path}: it was trained for another model (target_hash differs)")

    def tensors() -> None:
        if source.repo:
            facts.append(("tensors", "not checked: the weights are still on the hub"))
        else:
            hf.check_draft(source.path, config, abstract)

    _collect(problems, pairing, tensors)
    return facts, problems


def _collect(problems: list[str], *checks: Callable[[], None]) -> None:
    for check in checks:
        try:
            check()
        except ConfigError as error:
            problems.append(str(error))


def _shapes(config: TargetConfig | DraftConfig) -> Facts:
    heads = f"{config.num_heads} heads over {config.num_kv_heads} of keys and values, {config.head_dim} wide"
    return [
        ("layers", f"{config.num_layers}, hidden {config.hidden_size}, MLP {config.intermediate_size}"),
        ("heads", heads),
        ("vocabulary", f"{config.vocab_size} rows"),
    ]


def _attention(config: DraftConfig) -> str:
    kinds = [
        f"{'causal' if config.causal[i] else 'bidirectional'}"
        + (f" in a window of {config.window(i)}" if config.window(i) else "")
        for i in range(config.num_layers)
    ]
    return kinds[0] if len(set(kinds)) == 1 else ", ".join(f"{i}: {kind}" for i, kind in enumerate(kinds))


def _rope_and_length(rope: RopeConfig, max_positions: int) -> Facts:
    scaling = f", factor {rope.factor:g}" if rope.factor != 1.0 else ""
    scaling += f", {len(rope.divisors)} divisors (llama3)" if rope.divisors else ""
    return [
        ("rope", f"{rope.type}, theta {rope.theta:g}{scaling}"),
        ("context", str(max_positions) if max_positions else "not stated"),
    ]


def _recurrent(config: TargetConfig) -> Facts:
    if (r := config.recurrent) is None:
        return []
    layers = sum(kind == RECURRENT for kind in config.layer_types)
    return [
        (
            "recurrent",
            f"{layers} of {config.num_layers} layers: {r.value_heads} value heads, {r.value_dim} wide, over "
            f"{r.key_heads} key heads, {r.key_dim} wide; convolution of {r.conv_width}",
        ),
        ("rotates", f"{config.rotary_dim} of {config.head_dim} dimensions of a head"),
    ]


def _experts(config: TargetConfig) -> Facts:
    if (m := config.moe) is None:
        return []
    shared = m.shared_intermediate_size
    beside = f", and one of {shared} for every token" if shared else ""
    where = f"{sum(m.layers)} of {config.num_layers} layers"
    return [("experts", f"{m.experts} in {where}, {m.per_token} a token, MLP {m.intermediate_size}{beside}")]


def _memory(config: TargetConfig | DraftConfig, abstract: dict[str, Any]) -> Facts:
    count = weight_bytes(abstract, "float32") // DTYPES["float32"].itemsize
    facts = [
        ("parameters", f"{count:,}"),
        ("weights", _by_dtype(lambda size: count * size)),
        ("cache", _by_dtype(lambda size: _per_token(config, size)) + " per token"),
    ]
    if any(kind == RECURRENT for kind in config.layer_types):
        state = _by_dtype(lambda size: cache_bytes(config, 1, 0, size))
        facts.append(("state", f"{state}, whatever the length"))
    return facts


def _per_token(config: TargetConfig | DraftConfig, itemsize: int) -> int:
    return cache_bytes(config, 1, 1, itemsize) - cache_bytes(config, 1, 0, itemsize)


def _trail(config: TargetConfig) -> Facts:
    """What a verify leaves behind until it is committed; --rollback matters to recurrent layers only."""

    def kept(rollback: str) -> str:
        return _by_dtype(lambda size: trail_bytes(config, 1, _NODES, size, rollback)) + f" of {_NODES} nodes"

    if config.recurrent is None:
        return [("trail", kept("tape"))]
    return [("trail", f"{kept('tape')}, --rollback tape"), ("", f"{kept('states')}, --rollback states")]


def _by_dtype(size: Callable[[int], int]) -> str:
    return ", ".join(f"{_bytes(size(dtype.itemsize))} as {name}" for name, dtype in DTYPES.items())


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 2**10:.1f} KiB"
