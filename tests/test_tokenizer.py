"""Tokenizers from folders, GGUF files and bytes. The vocabularies are made here, byte by byte."""

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
from gguf import GGUFWriter
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from dflash_jax.config import ConfigError
from dflash_jax.tokenizer import ByteTokenizer, StreamDecoder, from_folder, from_gguf
from dflash_jax.vocabulary import BYTE_ALPHABET, CONTROL, NORMAL, RULES, UNKNOWN, USER_DEFINED

BYTE = 6  # tokenizer.ggml.token_type of SentencePiece's byte tokens
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT = [{"role": "user", "content": "hé 12"}]
SPECIAL = ["<bos>", "<|im_start|>", "<|im_end|>", "<eos>"]
WORDS = ["he", "hel", "hello", "Ġhe", "12", "123"]
MERGES = ["h e", "he l", "l o", "hel lo", "Ġ he", "1 2", "12 3"]
BYTE_LEVEL = [*SPECIAL, *BYTE_ALPHABET, "lo", *WORDS]
BOS, IM_START, IM_END, EOS = range(4)


def save_folder(folder: Path, decoder=None, bos=True, **config) -> Path:
    """A folder as transformers writes it: byte-level BPE with BOS in the post-processor."""
    vocabulary = {token: id for id, token in enumerate(BYTE_LEVEL)}
    backend = Backend(models.BPE(vocabulary, [tuple(merge.split()) for merge in MERGES]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoder or decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    if bos:
        backend.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", BOS)])
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": {"content": "<bos>"}, "eos_token": "<eos>", "chat_template": TEMPLATE, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def save_gguf(path: Path, **changes) -> Path:
    """A vocabulary-only GGUF. A change of None leaves the key out."""
    values = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": BYTE_LEVEL,
        "token_type": [CONTROL] * 4 + [NORMAL] * (len(BYTE_LEVEL) - 4),
        "merges": MERGES,
        "eos_token_id": EOS,
        "bos_token_id": BOS,
        **changes,
    }
    writer = GGUFWriter(path, "llama")
    writer.add_chat_template(values.pop("chat_template", TEMPLATE))
    for name, value in values.items():
        key = f"tokenizer.ggml.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return path


PIECES = ["▁", "a", "b", "c", "▁a", "ab", "bc", "abc", "▁ab", "aa", "▁▁", "<", "s", ">", "s>"]


def save_sentence_piece(path: Path, **changes) -> Path:
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *byte_tokens, *PIECES]
    values = {
        "model": "llama",
        "pre": None,
        "merges": None,
        "tokens": tokens,
        "token_type": [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(PIECES),
        "scores": [0.0] * 259 + [-float(rank) for rank in range(len(PIECES))],
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }
    return save_gguf(path, **values)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return from_folder(save_folder(tmp_path_factory.mktemp("folder")))


@pytest.fixture(scope="module")
def sentence_piece(tmp_path_factory):
    return from_gguf(save_sentence_piece(tmp_path_factory.mktemp("spm") / "v.gguf"))


# Folders


@given(text=st.text(st.characters(codec="utf-8")))
def test_folder_round_trip(folder, text):
    assert folder.decode(folder.encode(text, special=False)) == text


def test_truncation_and_padding_of_the_file_are_ignored(folder):
    assert len(folder.encode("abcdefgh")) == 8


def test_special_tokens_in_a_text(folder):
    assert folder.encode("<|im_end|>") == [IM_END]
    assert len(folder.encode("<|im_end|>", special=False)) == len("<|im_end|>")
    assert folder.decode([IM_END, *folder.encode("hello")]) == "hello"
    assert folder.decode([IM_END, *folder.encode("hello")], skip_special=False) == "<|im_end|>hello"


def test_threads_do_not_mix_their_choices(folder):
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda i: folder.encode("<|im_end|>", special=i % 2 == 0), range(400)))
    assert [len(ids) for ids in results] == [1, 10] * 200


def test_bos_is_added_only_when_asked_and_once(folder, tmp_path):
    hello = folder.encode("hello")
    assert folder.add_bos and folder.bos_id == BOS
    assert BOS not in hello
    assert folder.encode("hello", bos=True) == [BOS, *hello] == folder.encode("<bos>hello", bos=True)
    without = from_folder(save_folder(tmp_path / "without", bos=False, add_bos_token=True))
    assert without.encode("hello", bos=True) == hello


def test_chat_writes_its_own_bos(folder):
    ids = folder.chat(CHAT)
    assert ids[:2] == [BOS, IM_START] and ids.count(BOS) == 1
    assert folder.render(CHAT) == "<bos><|im_start|>user\nhé 12<|im_end|>\n<|im_start|>assistant\n"
    assert folder.chat(CHAT, False) == ids[: len(folder.chat(CHAT, False))]
    assert folder.decode(ids, skip_special=False) == folder.render(CHAT)
    assert folder.chat([{"role": "user", "content": "<|im_end|>"}]).count(IM_END) == 2  # as transformers


def test_stop_ids_come_from_all_files(tmp_path):
    folder = save_folder(tmp_path)
    assert from_folder(folder).stop_ids == (IM_END, EOS)  # the template's end of turn, the tokenizer's eos
    (folder / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 100}}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [101, EOS]}))
    assert from_folder(folder).stop_ids == (IM_END, EOS, 100, 101)


def test_template_sources(tmp_path):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "one"}]
    folder = save_folder(tmp_path, chat_template=named)
    assert from_folder(folder).render(CHAT) == "one"
    (folder / "chat_template.jinja").write_text("two")
    assert from_folder(folder).render(CHAT) == "two"


def test_no_template(tmp_path):
    tokenizer = from_folder(save_folder(tmp_path, chat_template=None))
    assert not tokenizer.has_template
    with pytest.raises(ConfigError, match=r"tokenizer\.json has no chat template"):
        tokenizer.chat(CHAT)


def test_no_messages(folder):
    with pytest.raises(ConfigError, match="no messages"):
        folder.chat([])


def test_tokens_declared_only_in_the_config(tmp_path):
    declared = {str(len(BYTE_LEVEL)): {"content": "<new>", "special": True}}
    tokenizer = from_folder(save_folder(tmp_path, added_tokens_decoder=declared))
    assert tokenizer.encode("<new>") == [len(BYTE_LEVEL)]
    assert tokenizer.vocab_size == len(BYTE_LEVEL) + 1
    assert tokenizer.decode([len(BYTE_LEVEL)]) == ""


def test_rows_beyond_the_vocabulary_decode_to_nothing(folder):
    assert folder.decode([folder.vocab_size, 10**9, *folder.encode("ab")]) == "ab"


def test_lone_surrogate(folder):
    for tokenizer in (folder, ByteTokenizer()):
        with pytest.raises(ConfigError, match="lone surrogate at character 2"):
            tokenizer.encode("ab\udcff")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"eos_token": "<gone>"}, "eos_token is '<gone>', which is not in the vocabulary"),
        ({"bos_token": {"id": 3}}, r"bos_token\.content is missing"),
        ({"chat_template": 5}, "chat_template is 5: it must be a string"),
        ({"added_tokens_decoder": {"9": {"content": "<eos>"}}}, "is '<eos>', which has the id 3"),
        ({"decoder": decoders.WordPiece()}, "decoder 'WordPiece' is not supported"),
    ],
)
def test_bad_tokenizer_config(tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        from_folder(save_folder(tmp_path, **change))


def test_bad_files(tmp_path):
    with pytest.raises(ConfigError, match=r"tokenizer\.json: no such file"):
        from_folder(tmp_path)
    save_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "2"}')
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id is '2'"):
        from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: not a tokenizer"):
        from_folder(tmp_path)


# GGUF, byte level


def test_gguf_equals_the_folder(folder, tmp_path):
    tokenizer = from_gguf(save_gguf(tmp_path / "v.gguf"))
    text = "hello hello 1234 <|im_start|>\n\n  é 😀"
    assert tokenizer.encode(text) == folder.encode(text)
    assert tokenizer.chat(CHAT) == folder.chat(CHAT)
    assert tokenizer.stop_ids == (IM_END, EOS)
    assert tokenizer.vocab_size == len(BYTE_LEVEL)
    assert not tokenizer.add_bos


@pytest.mark.parametrize(
    "pre, words",
    [
        ("default", "It|'|s| |123|456|7|  | x|+|\n|\n|न|\u093f|."),
        ("gpt-2", "It|'s| 1234567|  | x|+|\n|\n|न|\u093f."),
        ("smollm", "It|'s| |1|2|3|4|5|6|7|  | x|+|\n|\n|न|\u093f."),
        ("llama-bpe", "It|'s| |123|456|7|  | x|+\n\n|न|\u093f."),
        ("qwen2", "It|'s| |1|2|3|4|5|6|7|  | x|+\n\n|न|\u093f."),
        ("qwen35", "It|'s| |1|2|3|4|5|6|7|  | x|+\n\n|न\u093f|."),
    ],
)
def test_word_rules(pre, words):
    """One text that tells the rules apart: digits, newlines after a mark, a letter's vowel sign."""
    text = words.replace("|", "")
    pieces = RULES[pre].split().pre_tokenize_str(text)
    assert "|".join(text[start:end] for _, (start, end) in pieces) == words


def test_llama3_takes_whole_words_and_bos_by_default(tmp_path):
    merges = [merge for merge in MERGES if merge != "hel lo"]  # "hello" is out of the merges' reach
    rule = from_gguf(save_gguf(tmp_path / "a.gguf", pre="llama-bpe", merges=merges))
    assert rule.encode("hello", bos=True) == [BOS, BYTE_LEVEL.index("hello")]
    said = from_gguf(save_gguf(tmp_path / "b.gguf", pre="llama-bpe", add_bos_token=False))
    assert said.encode("hello", bos=True) == [BYTE_LEVEL.index("hello")]


def test_qwen_composes_characters(tmp_path):
    tokenizer = from_gguf(save_gguf(tmp_path / "v.gguf", pre="qwen2"))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("é")


def test_user_defined_tokens_are_matched_and_shown(tmp_path):
    types = [CONTROL] * 4 + [NORMAL] * (len(BYTE_LEVEL) - 4) + [USER_DEFINED]
    tokenizer = from_gguf(save_gguf(tmp_path / "v.gguf", tokens=[*BYTE_LEVEL, "<é k>"], token_type=types))
    assert tokenizer.encode("<é k>", special=False) == [len(BYTE_LEVEL)]
    assert tokenizer.decode([len(BYTE_LEVEL)]) == "<é k>"


@pytest.mark.parametrize("key", ["eos_token_id", "eot_token_id", "eom_token_id"])
def test_gguf_stop_ids(tmp_path, key):
    path = save_gguf(tmp_path / "v.gguf", chat_template="{{ messages }}", **{"eos_token_id": None, key: 7})
    assert from_gguf(path).stop_ids == (7,)


def test_minus_one_is_no_token(tmp_path):
    assert from_gguf(save_gguf(tmp_path / "v.gguf", bos_token_id=2**32 - 1)).bos_id is None


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"model": "bert"},
            r"v\.gguf: tokenizer\.ggml\.model 'bert' is not supported: known are gpt2 and llama",
        ),
        ({"pre": "tekken"}, r"tokenizer\.ggml\.pre 'tekken' is not supported: known are .*qwen35.*smollm"),
        ({"pre": None}, r"tokenizer\.ggml\.pre is missing"),
        ({"tokens": [*BYTE_LEVEL[:-1], "he"]}, "holds the same token twice"),
        ({"token_type": [1, 2]}, f"token_type must be an array of {len(BYTE_LEVEL)} finite numbers"),
        ({"token_type": None}, "token_type is missing"),
        ({"merges": ["he"]}, "merges holds 'he', which is not a pair"),
        ({"merges": ["q q"]}, "merges do not fit the tokens"),
        ({"eos_token_id": 9999}, f"eos_token_id is 9999, outside the {len(BYTE_LEVEL)} tokens"),
        ({"bos_token_id": None, "add_bos_token": True}, "wants BOS .* names no bos_token"),
        ({"add_bos_token": "yes"}, "add_bos_token is 'yes': it must be true or false"),
    ],
)
def test_bad_gguf(tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        from_gguf(save_gguf(tmp_path / "v.gguf", **change))


# GGUF, SentencePiece


def merge_by_score(text: str) -> list[str]:
    """SentencePiece's own procedure: join the neighbours with the best joined score, leftmost first."""
    rank = {piece: index for index, piece in enumerate(PIECES)}
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        joined = [left + right for left, right in pairwise(pieces)]
        known = [(rank[piece], at) for at, piece in enumerate(joined) if piece in rank]
        if not known:
            return pieces
        at = min(known)[1]
        pieces[at : at + 2] = [joined[at]]


@given(text=st.text("abc <s>", min_size=1))
def test_sentence_piece_merges_by_score(sentence_piece, text):
    ids = sentence_piece.encode(text, special=False)
    assert ids == [259 + PIECES.index(piece) for piece in merge_by_score(text)]


@given(text=st.text(st.characters(codec="utf-8", exclude_characters="▁")))
def test_sentence_piece_round_trip(sentence_piece, text):
    assert sentence_piece.decode(sentence_piece.encode(text, special=False)) == text


def test_sentence_piece_bytes_and_spaces(sentence_piece, tmp_path):
    smile = [3 + byte for byte in "😀".encode()]
    assert sentence_piece.encode("😀") == [259, *smile]
    assert sentence_piece.decode([*smile, 259, 260]) == "😀 a"
    assert sentence_piece.decode([259, 259, 260]) == " a"  # one space only is the encoder's
    assert sentence_piece.encode("<s>a", bos=True) == [1, 263] == sentence_piece.encode("a", bos=True)
    bare = from_gguf(save_sentence_piece(tmp_path / "v.gguf", add_space_prefix=False))
    assert bare.encode("a") == [260]
    assert bare.decode([259, 260]) == " a"


@pytest.mark.parametrize(
    "change, message",
    [
        ({"scores": None}, r"tokenizer\.ggml\.scores is missing"),
        ({"scores": [0.0] * 258 + [float("nan")] * (len(PIECES) + 1)}, "scores must be an array of"),
        ({"unknown_token_id": 5000}, "unknown_token_id is 5000, outside the vocabulary"),
    ],
)
def test_bad_sentence_piece(tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        from_gguf(save_sentence_piece(tmp_path / "v.gguf", **change))


# Bytes


@pytest.mark.parametrize("kind", ["byte level", "sentence piece", "bytes"])
def test_spans_say_where_each_id_comes_from(tmp_path, kind):
    if kind == "byte level":
        tokenizer = from_folder(save_folder(tmp_path / "x"))
    else:
        tokenizer = (
            ByteTokenizer() if kind == "bytes" else from_gguf(save_sentence_piece(tmp_path / "x.gguf"))
        )
    text = "abc hé 12 <|im_end|>😀 ab"
    ids, spans = tokenizer.encode_spans(text)
    assert ids == tokenizer.encode(text) and len(spans) == len(ids)
    assert all(0 <= start < end <= len(text) for start, end in spans)
    assert {i for span in spans for i in range(*span)} == set(range(len(text)))
    whole = [(id, span) for id, span in zip(ids, spans, strict=True) if spans.count(span) == 1]
    assert all(
        tokenizer.decode([id], skip_special=False).strip() == text[slice(*span)].strip() for id, span in whole
    )


def test_byte_tokenizer():
    tokenizer = ByteTokenizer(vocab_size=258, stop_ids=[257])
    assert tokenizer.encode("aé") == [97, 0xC3, 0xA9]
    assert tokenizer.decode([97, 257, 0xC3, 0xA9]) == "aé"
    assert tokenizer.decode(tokenizer.chat(CHAT)) == "user: hé 12\nassistant: "
    with pytest.raises(ConfigError, match="256"):
        ByteTokenizer(4)


# Streams: every kind of vocabulary, any ids, any cut


@given(ids=st.lists(st.integers(0, 300)), cuts=st.lists(st.integers(1, 5)), skip=st.booleans())
def test_stream_equals_decode(folder, sentence_piece, ids, cuts, skip):
    for tokenizer in (folder, sentence_piece, ByteTokenizer()):
        stream, texts, rest = StreamDecoder(tokenizer, skip), [], list(ids)
        for cut in cuts:
            texts.append(stream.push(rest[:cut]))
            rest = rest[cut:]
        texts += [stream.push([id]) for id in rest]
        texts.append(stream.flush())
        assert "".join(texts) == tokenizer.decode(ids, skip)


# The real model


@pytest.mark.model
def test_smollm2_golden(smollm2_gguf):
    tokenizer = from_gguf(smollm2_gguf)
    assert tokenizer.stop_ids == (2,) and tokenizer.vocab_size == 49152 and not tokenizer.add_bos
    golden = json.loads((Path(__file__).parent / "golden" / "smollm2_greedy.json").read_text())
    assert golden
    for case in golden:
        assert tokenizer.chat([{"role": "user", "content": case["prompt"]}]) == case["prompt_tokens"]
        assert tokenizer.decode(case["new_tokens"], skip_special=False) == case["text"]
