"""What a file is, without loading it: family, shapes, taps, mask id, rope, block, memory, problems."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from dflash_jax import drafts, targets, tokenizer
from dflash_jax.cache import cache_bytes, trail_bytes
from dflash_jax.config import RECURRENT, ConfigError, DraftConfig, RopeConfig, TargetConfig, check_pair
from dflash_jax.pair import DTYPES, draft_config, target_config, weight_bytes
from dflash_jax.sources import Source, find_draft, find_target
from dflash_jax.weights import draft_gguf, draft_schema, gguf, hf
from dflash_jax.weights.draft_gguf import NeedsTarget
from dflash_jax.weights.gguf_file import read_file
from dflash_jax.weights.schema import ARCHITECTURE, architectures, folder_config

Facts = list[tuple[str, str]]
Report = Callable[[Facts, list[str]], None]  # adds what is known, and what is wrong
# What marks a draft of any kind, ours or one that its reader refuses by name.
_DRAFT_KEYS = ("dflash_config", "speculators_model_type", "mask_token_id", "markov_rank")
# Nodes of the verify whose trail is told: the block size of most drafts.
_NODES = 16


def run(name: str, target: str | None) -> int:
    """Print what `name` is. Raises ConfigError with all problems, after everything else was said."""
    problems: list[str] = []
    belongs_to = find_target(target).target if target is not None else None
    found = find_target(name)
    if is_draft(found.target):
        _show(found.target, "draft", problems, partial(draft_report, found.target, belongs_to))
    else:
        if belongs_to is not None:
            raise ConfigError(f"{name} is a target: --target checks a draft, so give the draft as PATH")
        _show(found.target, "target", problems, partial(target_report, found.target))
        if found.draft is not None:
            draft = find_draft(name)
            _show(draft, "draft", problems, partial(draft_report, draft, found.target))
    if problems:
        raise ConfigError("; ".join(problems))
    return 0


def is_draft(source: Source) -> bool:
    if source.is_gguf:
        return gguf.is_draft(source.path)
    fields = folder_config(source.path)
    names = architectures(fields)
    return ARCHITECTURE in names or any(key in fields for key in _DRAFT_KEYS)


def _show(source: Source, role: str, problems: list[str], report: Report) -> None:
    print(f"{source.name}: a {role} ({'GGUF file' if source.is_gguf else 'Hugging Face folder'})")
    known: Facts = []
    wrong: list[str] = []
    _collect(wrong, lambda: report(known, wrong))
    for key, value in [("path", str(source.path)), *known]:
        print(f"  {key:14}{value}")
    print(f"  {'problems':14}{'none' if not wrong else ''}")
    for problem in wrong:
        print(f"    - {problem}")
    problems += wrong


def target_report(source: Source, facts: Facts, problems: list[str]) -> None:
    config = target_config(source)
    abstract = targets.abstract_params(config)
    facts += [("family", config.family), *_shapes(config), *_recurrent(config), *_experts(config)]
    facts.append(("head", "the embedding (tied)" if config.tie_word_embeddings else "its own"))
    facts += _rope_and_length(config.rope, config.max_positions)
    facts += [*_memory(config, abstract), *_trail(config)]
    facts.append(("config hash", config.hash()))

    def words() -> None:
        read = _words(source)
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


def draft_report(source: Source, target: Source | None, facts: Facts, problems: list[str]) -> None:
    host = target_config(target) if target is not None else None
    if source.is_gguf:
        facts += _schema(source)
    try:
        config = draft_config(source, host)
    except NeedsTarget as error:
        facts.append(("incomplete", str(error)))
        _check_tensors(source, draft_gguf.shape_config(source.path))
        return
    abstract = drafts.abstract_params(config)
    facts += [
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

    def pairing() -> None:
        if host is None:
            facts.append(("fits", "not checked: name a target with --target"))
            return
        check_pair(host, config)
        facts.append(("fits", "the target's hidden size, vocabulary and depth"))
        if trained.target_hash and trained.target_hash != host.hash():
            problems.append(f"{source.path}: it was trained for another model (target_hash differs)")

    def words() -> None:
        if target is not None and source.is_gguf:
            facts.append(("tokenizer", _compare_tokens(source, target)))

    def tensors() -> None:
        if source.repo:
            facts.append(("tensors", "not checked: the weights are still on the hub"))
        else:
            _check_tensors(source, config)

    _collect(problems, pairing, words, tensors)


def _schema(source: Source) -> Facts:
    """Who wrote a GGUF draft, and what it says."""
    file = read_file(source.path)
    family = draft_schema.family_of(file)
    said = [("", f"{line:54}  {meaning}") for line, meaning in draft_schema.listing(file, family)]
    kinds = Counter(tensor.kind for tensor in file.tensors.values())
    return [
        ("family", f"{family.name} (written by {family.writer})"),
        ("types", ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())),
        ("schema", ""),
        *said,
    ]


def _check_tensors(source: Source, config: DraftConfig) -> None:
    reader = draft_gguf.check_draft if source.is_gguf else hf.check_draft
    reader(source.path, config, drafts.abstract_params(config))


def _words(source: Source) -> tokenizer.Tokenizer:
    return (tokenizer.from_gguf if source.is_gguf else tokenizer.from_folder)(source.path)


def _compare_tokens(source: Source, target: Source) -> str:
    """A GGUF draft may carry its target's tokens: ids must mean the same. ConfigError where they do not."""
    tokens = read_file(source.path).metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        return "none in the file: the target's is used"
    words = _words(target)
    for id, token in enumerate(tokens):
        # converters fill up unused rows
        if token and (own := words.piece(id)) is not None and own != token:
            raise ConfigError(
                f"{source.path}: its token {id} is {token!r}, this target's is {own!r}: it belongs to another model"
            )
    return f"{len(tokens)} tokens, the target's"


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
    return ", ".join(f"{size_of(size(dtype.itemsize))} as {name}" for name, dtype in DTYPES.items())


def size_of(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 2**10:.1f} KiB"
