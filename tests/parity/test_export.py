"""What is exported, read by others: transformers loads the target, PyPI `dflash` the draft, and both decode
the same tokens in the same rounds as we do."""

from __future__ import annotations

import time
from pathlib import Path

import dflash.model
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from dflash.model import DFlashDraftModel
from parity.twins import difference, empty_cache, forward, torch_states

from dflash_jax import pair
from dflash_jax.block import chain_block
from dflash_jax.decode import complete
from dflash_jax.policy import Fixed
from dflash_jax.state import Options
from dflash_jax.testing import draft_config, make_models, target_config
from dflash_jax.tokenizer import ByteTokenizer
from dflash_jax.weights import hf
from train import build, byte_vocabulary, export
from train.settings import Settings

VOCAB, BUDGET, SIZE = 5, 48, 8


# Of random models whose draft is right now and then. Not of hybrid targets: the reference takes rejected
# tokens back by cropping its cache, which a recurrent state does not have.
SEEDS = {"llama": 3, "qwen2": 3, "qwen3": 3, "qwen3_moe": 9}


@pytest.mark.parametrize("family", SEEDS)
def test_an_exported_draft_commits_the_same_rounds_in_the_reference(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random models of 5 tokens, where a draft is right now and then. No tap is the last layer: there the
    reference reads the normed state."""
    target = target_config(family, num_layers=3, vocab_size=VOCAB, max_positions=256)
    draft = draft_config(target, taps=(0, 1), max_positions=256)
    models = make_models(target, draft, SEEDS[family])
    weights, of_draft = (jax.tree.map(np.asarray, x) for x in (models.target_params, models.draft_params))
    hf.save_target(tmp_path / "target", target, weights, np.float32)
    byte_vocabulary.write(tmp_path / "target")
    settings = Settings(name="parity", target=str(tmp_path / "target"))
    export.write_draft(tmp_path / "draft", draft, of_draft, settings, {}, {}, build.load_target(settings))

    loaded = pair.load(str(tmp_path / "target"), str(tmp_path / "draft"), dtype="float32")
    prompts = np.random.default_rng(0).integers(0, VOCAB, (4, 9)).tolist()
    ours = complete(loaded.models, prompts, Options(Fixed(SIZE)), max_new_tokens=BUDGET)

    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float32)
    drafter = DFlashDraftModel.from_pretrained(tmp_path / "draft", dtype=torch.float32)
    # the reference asks CUDA for the time when it is asked for statistics
    monkeypatch.setattr(dflash.model, "_cuda_time", time.perf_counter)
    accepted = 0
    for row, prompt in enumerate(prompts):
        out = dflash.model.dflash_generate(
            drafter.eval(), theirs.eval(), torch.tensor([prompt]), BUDGET, [], return_stats=True
        )
        assert ours.tokens[row] == out.output_ids[0, len(prompt) :].tolist()
        committed = list(out.acceptance_lengths)
        # the reference shortens the draft's block near the end of the budget
        whole = int(np.sum(np.cumsum([0, *committed[:-1]]) + SIZE <= BUDGET))
        assert ours.committed[row][:whole] == committed[:whole]
        accepted += sum(committed[:whole]) - whole
    assert accepted >= 10, "a draft that is never right says little"


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_an_exported_hybrid_target_gives_its_logits(family: str, tmp_path: Path) -> None:
    target = target_config(family, max_positions=64)
    models = make_models(target)
    hf.save_target(tmp_path, target, jax.tree.map(np.asarray, models.target_params), np.float32)
    tokens = np.random.default_rng(0).integers(0, target.vocab_size, 23)
    block = chain_block(jnp.asarray(tokens[None], jnp.int32))
    ours = forward(models.target, models.target_params, block, empty_cache(target, 1, 24)).logits[0]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert difference(ours, torch_states(theirs.eval(), tokens.tolist())[1]) <= 1e-4


def test_the_config_is_the_nested_schema_with_what_others_ignore(tmp_path: Path) -> None:
    target = target_config("llama")
    draft = draft_config(target, max_positions=64)
    models = make_models(target, draft)
    params = jax.tree.map(np.asarray, models.draft_params)
    of = pair.Target(target, models.target, models.target_params, ByteTokenizer(), "org/name")
    export.write_draft(tmp_path, draft, params, Settings(name="x", target="org/name"), {}, {}, of)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert config.architectures == ["DFlashDraftModel"] and config.model_type == "qwen3"
    assert config.dflash_config["block_size"] == draft.block_size
    assert config.dflash_config["target_layer_ids"] == list(draft.taps)
    assert config.dflash_config["training"]["target_name"] == "org/name"
    model = DFlashDraftModel.from_pretrained(tmp_path)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
