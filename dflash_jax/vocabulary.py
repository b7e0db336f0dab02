"""A GGUF file's vocabulary as a `tokenizers.Tokenizer`.

Two kinds of vocabulary are read: "gpt2", byte-level BPE whose text is first cut into words by a
rule that the file names (`tokenizer.ggml.pre`), and "llama", SentencePiece BPE with byte fallback.
The rules follow the models' own tokenizer.json; where such a file normalises (Qwen: NFC) so does
this, which llama.cpp leaves out. Names of the rules: llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from dflash_jax.weights.fields import Fields

SPACE = "▁"  # U+2581, SentencePiece's visible space
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # tokenizer.ggml.token_type
_MAX_PIECE = 1024  # characters; deriving merges is quadratic in a piece's length


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2): itself where it
    is printable Latin-1, else the next one from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): b for i, b in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()


def _isolate(*patterns: str) -> list[pre_tokenizers.PreTokenizer]:
    return [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]


def _words(letters: str, digits: str) -> pre_tokenizers.PreTokenizer:
    """The cut that Llama 3 and Qwen share: contractions, words with one leading mark or space,
    digits, punctuation with the newlines after it, newlines, spaces."""
    pattern = "|".join(
        (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
            rf"[^\r\n\p{{L}}\p{{N}}]?[{letters}]+",
            digits,
            rf" ?[^\s{letters}\p{{N}}]+[\r\n]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        )
    )
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*_isolate(pattern), byte_level])


def _gpt2(*before: pre_tokenizers.PreTokenizer) -> pre_tokenizers.PreTokenizer:
    """GPT-2's own cut, which `tokenizers` has built in, after others."""
    return pre_tokenizers.Sequence([*before, pre_tokenizers.ByteLevel(add_prefix_space=False)])


def _default() -> pre_tokenizers.PreTokenizer:
    """llama.cpp's rule for files that name none: punctuation apart, then GPT-2's cut, then numbers
    in threes."""
    gpt2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    cuts = _isolate(r"[\p{P}$+<=>^~|]+", gpt2, r"\p{N}+", "[0-9]{3}")
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


@dataclass(frozen=True)
class _Rule:
    """split: builds the pre-tokenizer. nfc: compose characters first. whole_words: a word that is
    in the vocabulary is one token whatever the merges say. bos: BOS begins a text by default."""

    split: Callable[[], pre_tokenizers.PreTokenizer]
    nfc: bool = False
    whole_words: bool = False
    bos: bool = False


_LLAMA3 = _Rule(lambda: _words(r"\p{L}", r"\p{N}{1,3}"), whole_words=True, bos=True)
_QWEN2 = _Rule(lambda: _words(r"\p{L}", r"\p{N}"), nfc=True)
_QWEN35 = _Rule(lambda: _words(r"\p{L}\p{M}", r"\p{N}"), nfc=True)
_DIGITS = _Rule(lambda: _gpt2(pre_tokenizers.Digits(individual_digits=True)))
RULES = {
    "default": _Rule(_default),
    "gpt-2": _Rule(_gpt2),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
    "qwen35": _QWEN35,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
}


def build(fields: Fields) -> tuple[Backend, bool]:
    """The tokenizer of `fields`, and whether a text begins with BOS when the file does not say.
    ConfigError names the field that is missing, malformed or not supported."""
    model = fields.text("tokenizer.ggml.model")
    if model == "gpt2":
        return _byte_level(fields)
    if model == "llama":
        return _sentence_piece(fields)
    raise fields.error("tokenizer.ggml.model", f"'{model}' is not supported: known are gpt2 and llama")


def _byte_level(fields: Fields) -> tuple[Backend, bool]:
    name = fields.text("tokenizer.ggml.pre")
    if name not in RULES:
        known = ", ".join(sorted(RULES))
        raise fields.error("tokenizer.ggml.pre", f"'{name}' is not supported: known are {known}")
    rule = RULES[name]
    vocabulary = _vocabulary(fields)
    merges = []
    for merge in fields.texts("tokenizer.ggml.merges"):
        left, space, right = merge.partition(" ")
        if not (left and space and right):
            raise fields.error("tokenizer.ggml.merges", f"holds '{merge}', which is not a pair")
        merges.append((left, right))

    backend = _backend(fields, vocabulary, merges, ignore_merges=rule.whole_words)
    if rule.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = rule.split()
    backend.decoder = decoders.ByteLevel()
    _add_special(backend, fields, vocabulary)
    return backend, rule.bos


def _sentence_piece(fields: Fields) -> tuple[Backend, bool]:
    vocabulary = _vocabulary(fields)
    tokens = list(vocabulary)
    unknown = fields.integer("tokenizer.ggml.unknown_token_id", 0)
    if unknown >= len(tokens):
        raise fields.error("tokenizer.ggml.unknown_token_id", f"is {unknown}, outside the vocabulary")
    backend = _backend(
        fields,
        vocabulary,
        _derived_merges(fields, vocabulary),
        unk_token=tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    prefix = fields.flag("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    _add_special(backend, fields, vocabulary)
    return backend, True


def _vocabulary(fields: Fields) -> dict[str, int]:
    """Token -> id, in the order of ids. Empty tokens get a name, as llama.cpp gives them one."""
    tokens = fields.texts("tokenizer.ggml.tokens")
    vocabulary = {token or f"[EMPTY_{id}]": id for id, token in enumerate(tokens)}
    if not tokens:
        raise fields.error("tokenizer.ggml.tokens", "is empty")
    if len(vocabulary) != len(tokens):
        raise fields.error("tokenizer.ggml.tokens", "holds the same token twice")
    return vocabulary


def _per_token(fields: Fields, key: str, count: int) -> np.ndarray:
    values = fields.get(key)
    if not isinstance(values, np.ndarray) or len(values) != count or not np.isfinite(values).all():
        raise fields.error(key, f"must be an array of {count} finite numbers, one per token")
    return values


def _derived_merges(fields: Fields, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose joined piece has the best score. BPE wants the same
    as ranked pairs: every way to cut a piece in two others, best score first, longer left part
    first among the cuts of one piece (as Hugging Face's conversion of Llama 2 orders them).

    Only normal pieces may be the result: a control token must never arise from plain text.
    """
    scores = _per_token(fields, "tokenizer.ggml.scores", len(vocabulary)).tolist()
    types = _per_token(fields, "tokenizer.ggml.token_type", len(vocabulary)).tolist()
    ranked = []
    for piece, id in vocabulary.items():
        if types[id] != NORMAL:
            continue
        if len(piece) > _MAX_PIECE:
            raise fields.error("tokenizer.ggml.tokens", f"holds a piece of {len(piece)} characters (id {id})")
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                ranked.append((-scores[id], -cut, left, right))
    ranked.sort(key=lambda pair: pair[:2])
    return [(left, right) for _, _, left, right in ranked]


def _backend(
    fields: Fields, vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any
) -> Backend:
    try:
        return Backend(models.BPE(vocab=vocabulary, merges=merges, **options))
    except Exception as error:  # the library raises a bare Exception with a sentence
        raise fields.error("tokenizer.ggml.merges", f"do not fit the tokens: {error}") from None


def _add_special(backend: Backend, fields: Fields, vocabulary: dict[str, int]) -> None:
    """Mark the tokens that are matched in a text before it is cut. User-defined ones are always
    matched and always decoded; control tokens are special (see Tokenizer.encode and decode)."""
    types = _per_token(fields, "tokenizer.ggml.token_type", len(vocabulary))
    tokens = list(vocabulary)
    control = np.flatnonzero((types == CONTROL) | (types == UNKNOWN))
    backend.add_special_tokens([AddedToken(tokens[id], normalized=False, special=True) for id in control])
    user = np.flatnonzero(types == USER_DEFINED)
    backend.add_tokens([AddedToken(tokens[id], normalized=False, special=False) for id in user])
