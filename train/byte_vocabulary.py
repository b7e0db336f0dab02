"""The tokenizer files of a tiny target: 256 bytes, four special tokens, the ChatML template.

A byte-level BPE without merges, so that every reader of tokenizer.json (this project's, transformers)
gives the same ids: a byte's id is its value.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from dflash_jax.vocabulary import BYTE_ALPHABET
from dflash_jax.weights.atomic import replacing

END_OF_TEXT, TURN, END_OF_TURN, MASK = range(256, 260)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
SIZE = 256 + len(SPECIAL)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write(folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json."""
    backend = Tokenizer(models.BPE(vocab=BYTE_ALPHABET, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[END_OF_TURN - 256],
        "pad_token": SPECIAL[END_OF_TEXT - 256],
        "mask_token": SPECIAL[MASK - 256],
        "chat_template": TEMPLATE,
    }
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "tokenizer_config.json") as file:
        file.write((json.dumps(config, indent=1) + "\n").encode())
    with replacing(folder / "tokenizer.json") as file:
        file.write(backend.to_str(pretty=False).encode())
