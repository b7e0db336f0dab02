# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Bring your own target and draft
#
# `--target` and `--draft`, and `pair.load` in Python, take any of four things:
#
# | what | example |
# |---|---|
# | a Hugging Face folder | `models/Qwen3-8B` |
# | a GGUF file | `Qwen3-8B-Q8_0.gguf` |
# | a hub id, at a revision if you want to be able to repeat it | `Qwen/Qwen3-8B`, `z-lab/Qwen3-8B-DFlash-b16@main` |
# | a short name of `configs/` | `smollm2` |
#
# in any combination: a folder's target with a GGUF draft, and so on. This notebook runs offline, on
# SmolLM2, its shipped draft and files that it makes. For large models only the names change:
#
#     python -m infer generate --target Qwen/Qwen3-8B --draft z-lab/Qwen3-8B-DFlash-b16 --prompt "..."

# %%
import contextlib
import io
import os
import shutil
import tempfile
from pathlib import Path

import jax
import numpy as np

import infer
from dflash_jax import decode, pair
from dflash_jax.compile_cache import keep_compiled
from dflash_jax.config import ConfigError
from dflash_jax.policy import Fixed
from dflash_jax.sources import find_draft
from dflash_jax.state import Options
from dflash_jax.weights import hf
from infer.__main__ import main
from train import byte_vocabulary, language_model
from train.settings import LanguageModel

keep_compiled()
budget = 12 if "DFLASH_NOTEBOOK_SMOKE" in os.environ else 32  # new tokens; CI runs every notebook smaller
workplace = tempfile.TemporaryDirectory()
os.chdir(workplace.name)


def run(command, status=0):
    """`python -m infer ...`; what it says goes here, its error messages too."""
    print(f"$ python -m infer {command}")
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        found = main(command.split())
    print(said.getvalue())
    assert found == status


# %% [markdown]
# ## A draft's folder
#
# `config.json`, `model.safetensors`, a model card. `inspect` reads it without loading it, and with
# `--target` compares it with a target: sizes, depth, vocabulary, mask token, taps. Whatever is wrong, it
# lists all of it.

# %%
shutil.copytree(Path(infer.__file__).parent / "assets" / "smollm2", "draft")
run("inspect draft --target smollm2")

# %% [markdown]
# ## As GGUF: for llama.cpp, and for Luce's runtime
#
# `--target` gives the file the target's tokenizer, which llama.cpp wants to find. The two runtimes name
# things differently, and one difference matters: llama.cpp's `target_layers` are our taps **plus one**.
# `inspect` shows each key with its value.

# %%
run("convert draft draft.gguf --format gguf --target smollm2")
run("convert draft draft-luce.gguf --format gguf-luce")
run("inspect draft.gguf --target smollm2")

# %% [markdown]
# From GGUF back to a folder (for vLLM, SGLang, z-lab's code): the same weights, to the last bit.

# %%
run("convert draft-luce.gguf back --format hf --target smollm2")

loaded = pair.load("smollm2", "draft")
for name in ("draft.gguf", "draft-luce.gguf", "back"):
    source = find_draft(name)
    config = pair.draft_config(source, loaded.target.config)
    params = pair.draft_params(source, config, np.dtype(np.float32))
    assert config.taps == loaded.draft.config.taps
    jax.tree.map(np.testing.assert_array_equal, params, jax.tree.map(np.asarray, loaded.draft.params))
print("all four are one draft")

# %% [markdown]
# ## Decode with any of them
#
# Quantised here to eight bits. A draft can lose tau by that, never a token.

# %%
run("convert draft draft-q8.gguf --format gguf --type Q8_0 --target smollm2")

words = loaded.target.tokenizer
prompt = words.chat([{"role": "user", "content": "Write a Python function that adds two numbers."}])
taus, texts = {}, {}
for name in ("draft", "draft-q8.gguf"):
    source = find_draft(name)
    config = pair.draft_config(source, loaded.target.config)
    params = jax.tree.map(jax.numpy.asarray, pair.draft_params(source, config, np.dtype(np.float32)))
    models = loaded.with_draft(pair.Draft(config, loaded.draft.module, params, name)).models
    request = {"max_new_tokens": budget, "stop_ids": words.stop_ids, "capacity": 128}
    state = decode.prefill(models, [prompt], Options(Fixed(6)), **request)
    done = decode.finish(decode.generate(models, state, Options(Fixed(6))))
    taus[name], texts[name] = round(done.tau, 2), done.tokens
alone = decode.finish(decode.generate_autoregressive(models, state))
assert all(text == alone.tokens for text in texts.values())
print(words.decode(alone.tokens[0]))
print("tau:", taus)

# %% [markdown]
# ## A target of your own
#
# A folder with `config.json`, weights and `tokenizer.json` of a family in `dflash_jax/targets` (llama,
# qwen2, qwen3, qwen3_moe, qwen3_5, qwen3_5_moe). Here a hybrid one with random weights, as `python -m train
# target` begins.

# %%
shape = LanguageModel(family="qwen3_5", layers=4, hidden_size=64, heads=2, kv_heads=1)
config = language_model.target_config(shape)
byte_vocabulary.write(Path("target"))
hf.save_target("target", config, jax.tree.map(np.asarray, language_model.start(config, seed=0)), np.float32)
run("inspect target")

# %% [markdown]
# A draft belongs to one target. What does not fit is said in a sentence, before any weights are read:

# %%
run("inspect draft --target target", status=2)
try:
    pair.load("target", "draft.gguf")
except ConfigError as error:
    print("pair.load:", error)
else:
    raise AssertionError("this pair does not fit")

# %% [markdown]
# ## What others run
#
# The folder is what z-lab's `dflash`, vLLM and SGLang load (tests compare with `dflash`; the model card in
# the folder has these commands with its own names):
#
#     vllm serve TARGET --speculative-config '{"method": "dflash", "model": "draft", "num_speculative_tokens": 5}'
#     python -m sglang.launch_server --model-path TARGET --speculative-algorithm DFLASH \
#         --speculative-draft-model-path draft --speculative-num-draft-tokens 6
#
# The first counts candidates, the second the anchor too. llama.cpp takes `draft.gguf` beside a GGUF of the
# target; convert a llama, qwen2 or qwen3 target with `python -m infer convert FOLDER target.gguf --format
# gguf`. (llama.cpp loads our drafts and decodes our targets to the same tokens, where it is installed:
# `tests/parity/test_llama_cpp.py`; with the draft it was not run yet.) A draft that was trained here is in
# `runs/NAME/draft`, ready for all of this.
