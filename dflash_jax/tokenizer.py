"""Text to token ids and back, from a Hugging Face folder, a GGUF file, or plain bytes.

    tokenizer = from_folder(folder)            # tokenizer.json, its configs and its chat template
    tokenizer = from_gguf("model.gguf")        # the vocabulary in the file's metadata
    tokenizer = ByteTokenizer()                # 256 bytes, for toy models

Encoding is the `tokenizers` library's. Decoding is ours: every token is a string of bytes, so a
text can be streamed exactly (see streaming.py). It equals the library's on valid UTF-8; of invalid
bytes the library's byte fallback replaces more.

Two facts about vocabularies. A character that byte-level BPE has no bytes for is left out by
encoding, as the model's own tokenizer does (SmolLM2 lacks six control characters). A model's
embedding may have more rows than the vocabulary: such ids decode to nothing.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from dflash_jax import vocabulary
from dflash_jax.chat_template import ChatTemplate
from dflash_jax.config import ConfigError
from dflash_jax.streaming import StopStrings, StreamDecoder, Vocabulary
from dflash_jax.weights.fields import Fields, read_json
from dflash_jax.weights.gguf_file import read_file

__all__ = ["ByteTokenizer", "StopStrings", "StreamDecoder", "Tokenizer", "from_folder", "from_gguf"]

# Tokens that end a turn. They stop generation where they are special and the template names them.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|end_of_turn|>")
# The special tokens' names: as in a template and in tokenizer_config.json, and in GGUF.
_GGUF_IDS = {
    "bos_token": "bos",
    "eos_token": "eos",
    "eot_token": "eot",
    "eom_token": "eom",
    "unk_token": "unknown",
    "pad_token": "padding",
}
_NO_ID = 2**32 - 1  # -1 as some converters write it: the model has no such token


class Tokenizer(Vocabulary):
    """One model's vocabulary, special tokens and chat template. Safe to share between threads.

    source: the file, for errors. special: name -> text of the special tokens (`bos_token`, ...).
    add_bos: a plain text begins with bos_id. stop_ids: the ids that end a generation, sorted.
    vocab_size: tokens in the vocabulary, added ones included.
    """

    def __init__(
        self,
        backend: Backend,
        source: str | Path,
        *,
        special: Mapping[str, str],
        add_bos: bool,
        stop_ids: Iterable[int],
        template: str | None,
    ):
        self._backend, self._lock = backend, threading.Lock()
        self.source = str(source)
        self.special = dict(special)
        self._added = {
            id: (token.content, token.special) for id, token in backend.get_added_tokens_decoder().items()
        }
        self._byte_level, self._byte_fallback, self.strips_space = _decoding(backend, self.source)
        self._bytes: dict[int, bytes] = {}
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.bos_id = self._id("bos_token")
        self.add_bos = add_bos
        if add_bos and self.bos_id is None:
            raise ConfigError(f"{source}: the model wants BOS in front of a text but names no bos_token")
        self._template = ChatTemplate(template, self.source, self.special) if template else None
        ends = {self._id("eos_token"), self._id("eot_token"), *stop_ids, *self._turn_ends(template or "")}
        self.stop_ids = tuple(sorted(id for id in ends if id is not None))

    @property
    def has_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, *, special: bool = True, bos: bool = False) -> list[int]:
        """Ids of `text`; nothing is added to it.

        special: special tokens written in the text become their ids; with False they are ordinary
        characters, which is what text from strangers wants. bos: put BOS in front when the model
        wants it there (`add_bos`) and the text does not begin with it, as a raw prompt needs.
        ConfigError on a lone surrogate (an undecodable byte of a command line).
        """
        _check_text(text)
        with self._lock:  # the library keeps the choice in the tokenizer
            self._backend.encode_special_tokens = not special
            ids = self._backend.encode(text, add_special_tokens=False).ids
        if bos and self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def encode_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """`encode(text)`, and the characters [start, end) of `text` that each id comes from. Ids that
        share a character's bytes share the character."""
        _check_text(text)
        with self._lock:
            self._backend.encode_special_tokens = False
            encoding = self._backend.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def piece(self, id: int) -> str | None:
        """A token as files write it: bytes in their byte-level form, visible spaces."""
        return self._backend.id_to_token(id)

    def token_bytes(self, id: int, skip_special: bool = True) -> bytes:
        if skip_special and self._added.get(id, ("", False))[1]:
            return b""
        if id not in self._bytes:
            self._bytes[id] = self._to_bytes(id)
        return self._bytes[id]

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The chat template's text for `messages` (see ChatTemplate.render). ConfigError when the
        model has no template or the template fails."""
        if self._template is None:
            raise ConfigError(f"{self.source} has no chat template: give the prompt as raw text instead")
        if not messages:
            raise ConfigError("there are no messages to render")
        return self._template.render(messages, add_generation_prompt, **variables)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Ids of the rendered messages, `[{"role": ..., "content": ...}, ...]`.

        As in transformers, the template writes its own BOS (none is added) and special tokens are
        recognised wherever they stand, in the content too: `<|im_end|>` in a user's message ends
        the turn. Filter untrusted content first if that matters.
        """
        return self.encode(self.render(messages, add_generation_prompt, **variables))

    def _id(self, name: str) -> int | None:
        return self._backend.token_to_id(self.special[name]) if name in self.special else None

    def _turn_ends(self, template: str) -> Iterable[int]:
        special = {content: id for id, (content, is_special) in self._added.items() if is_special}
        return (special[end] for end in _TURN_ENDS if end in special and end in template)

    def _to_bytes(self, id: int) -> bytes:
        token: str | None
        if id in self._added:
            token = self._added[id][0]
        else:
            token = self._backend.id_to_token(id) if 0 <= id < 2**32 else None
            if token is None:
                return b""
            if self._byte_level and all(char in vocabulary.BYTE_ALPHABET for char in token):
                return bytes(vocabulary.BYTE_ALPHABET[char] for char in token)
            if self._byte_fallback and len(token) == 6 and token.startswith("<0x") and token[-1] == ">":
                try:
                    return bytes.fromhex(token[3:5])
                except ValueError:
                    pass  # a piece that only looks like a byte
        return (token if self._byte_level else token.replace(vocabulary.SPACE, " ")).encode()


class ByteTokenizer(Vocabulary):
    """Ids 0 to 255 are bytes. Larger ones, up to vocab_size, are left to the toy model (mask, stop)
    and decode to nothing. The chat format is one `role: content` line per message."""

    has_template = True
    add_bos = False
    bos_id = None

    def __init__(self, vocab_size: int = 256, stop_ids: Iterable[int] = ()):
        if vocab_size < 256:
            raise ConfigError(f"a byte vocabulary needs 256 ids, not {vocab_size}")
        self.vocab_size = vocab_size
        self.stop_ids = tuple(sorted(stop_ids))

    def encode(self, text: str, *, special: bool = True, bos: bool = False) -> list[int]:
        _check_text(text)
        return list(text.encode())

    def encode_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        ids = self.encode(text)
        return ids, [(i, i + 1) for i, character in enumerate(text) for _ in character.encode()]

    def token_bytes(self, id: int, skip_special: bool = True) -> bytes:
        return bytes((id,)) if 0 <= id < 256 else b""

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        turns = [f"{message['role']}: {message['content']}\n" for message in messages]
        return "".join(turns) + ("assistant: " if add_generation_prompt else "")

    def chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        return self.encode(self.render(messages, add_generation_prompt))


def from_gguf(path: str | Path) -> Tokenizer:
    """The tokenizer in the metadata of a GGUF file. ConfigError names the field that is missing,
    malformed or not supported."""
    fields = Fields(path, read_file(path).metadata)
    backend, bos_default = vocabulary.build(fields)
    tokens = fields.texts("tokenizer.ggml.tokens")
    ids = {}
    for name, field in _GGUF_IDS.items():
        key = f"tokenizer.ggml.{field}_token_id"
        id = fields.integer(key, None, most=_NO_ID)
        if id is None or id == _NO_ID:
            continue
        if id >= len(tokens):
            raise fields.error(key, f"is {id}, outside the {len(tokens)} tokens")
        ids[name] = id
    return Tokenizer(
        backend,
        path,
        special={name: tokens[id] for name, id in ids.items()},
        add_bos=fields.flag("tokenizer.ggml.add_bos_token", bos_default),
        stop_ids=[ids[name] for name in ("eos_token", "eot_token", "eom_token") if name in ids],
        template=fields.text("tokenizer.chat_template", None),
    )


def from_folder(folder: str | Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder: tokenizer.json, with what tokenizer_config.json,
    chat_template.jinja, config.json and generation_config.json add. ConfigError names the file."""
    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{path}: no such file: a model's folder needs it, whatever else it holds")
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception with a sentence
        raise ConfigError(f"{path}: not a tokenizer ({error})") from None
    backend.no_truncation()
    backend.no_padding()

    config = _optional(folder / "tokenizer_config.json")
    named = Fields(config.file, {**_optional(folder / "special_tokens_map.json").values, **config.values})
    special = {name: text for name in _GGUF_IDS if (text := _content(named, name)) is not None}
    _add_missing(backend, config, special)
    return Tokenizer(
        backend,
        path,
        special=special,
        add_bos=_adds_bos(backend, special.get("bos_token")),
        stop_ids=_eos_ids(folder / "config.json") + _eos_ids(folder / "generation_config.json"),
        template=_folder_template(folder, config),
    )


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"the text holds a lone surrogate at character {error.start}: it is not valid Unicode"
        ) from None


def _decoding(backend: Backend, source: str) -> tuple[bool, bool, bool]:
    """(byte level, byte fallback, whether a text's first space is dropped) of a tokenizer's decoder.
    ConfigError for a decoder that is neither byte-level nor SentencePiece's."""
    state: dict[str, Any] = (
        json.loads(backend.decoder.__getstate__()) if backend.decoder else {"type": "none"}
    )
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return True, False, False
    strips = False
    for step in steps:
        match step:
            case {"type": "ByteFallback" | "Fuse"}:
                pass
            case {"type": "Replace", "pattern": {"String": vocabulary.SPACE}, "content": " "}:
                pass
            case {"type": "Metaspace", "replacement": vocabulary.SPACE, "prepend_scheme": scheme}:
                strips |= scheme != "never"
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                strips = True
            case _:
                raise ConfigError(
                    f"{source}: decoder '{' + '.join(kinds)}' is not supported: "
                    "known are byte-level and SentencePiece with byte fallback"
                )
    return False, "ByteFallback" in kinds, strips


def _optional(path: Path) -> Fields:
    """The values of a config file, none when there is no such file."""
    return Fields(path, read_json(path) if path.exists() else {})


def _content(fields: Fields, name: str) -> str | None:
    """The text of a token, which configs write as a string or as an object with flags."""
    if isinstance(fields.get(name, None), dict):
        return fields.section(name).text("content")
    return fields.text(name, None)


def _add_missing(backend: Backend, config: Fields, special: Mapping[str, str]) -> None:
    """Add the tokens that only tokenizer_config.json declares, and mark the named ones as special
    (transformers does both). The ids must come out as declared."""
    declared = config.section("added_tokens_decoder")
    for key in sorted(declared.values, key=lambda key: (len(key), key)):
        token = declared.section(key)
        text = token.text("content")
        if backend.token_to_id(text) is None:
            flags = {flag: token.flag(flag, False) for flag in ("special", "normalized", "lstrip", "rstrip")}
            backend.add_tokens([AddedToken(text, **flags)])
        if str(backend.token_to_id(text)) != key:
            raise declared.error(
                key, f"is '{text}', which has the id {backend.token_to_id(text)} in tokenizer.json"
            )
    for name in ("bos_token", "eos_token"):
        if name in special and backend.token_to_id(special[name]) is None:
            raise config.error(name, f"is '{special[name]}', which is not in the vocabulary")
    known = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    new = [text for text in special.values() if text not in known and backend.token_to_id(text) is not None]
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in new])


def _adds_bos(backend: Backend, bos: str | None) -> bool:
    """Whether tokenizer.json's post-processor begins a text with BOS. It alone decides:
    transformers 5 ignores `add_bos_token` next to a tokenizer.json."""
    return bos is not None and backend.encode("").ids[:1] == [backend.token_to_id(bos)]


def _eos_ids(path: Path) -> tuple[int, ...]:
    """`eos_token_id` of a config, one or several; multimodal configs nest it in `text_config`."""
    config = _optional(path)
    fields = config if "eos_token_id" in config else config.section("text_config")
    if isinstance(fields.get("eos_token_id", None), list):
        return fields.integers("eos_token_id")
    id = fields.integer("eos_token_id", None)
    return () if id is None else (id,)


def _folder_template(folder: Path, config: Fields) -> str | None:
    """The default chat template: a file of its own wins over the entry in tokenizer_config.json,
    which is a text or a list of named ones."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text("utf-8")
        except UnicodeDecodeError:
            raise ConfigError(f"{path}: not UTF-8") from None
    named = config.get("chat_template", None)
    if named is None:
        return _optional(folder / "chat_template.json").text("chat_template", None)
    if not isinstance(named, list):
        return config.text("chat_template")
    for entry in named:
        if isinstance(entry, dict) and entry.get("name") == "default":
            return Fields(config.file, entry, "chat_template").text("template")
    return None
