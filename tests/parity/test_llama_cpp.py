"""llama.cpp (llama-cpp-python, extra `peers`) reads the files that we write. Not in CI: it is compiled from source."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_jax import decode, pair
from dflash_jax.policy import Fixed
from dflash_jax.state import Options
from infer import peers
from infer.__main__ import main

llama_cpp = pytest.importorskip("llama_cpp")
pytestmark = pytest.mark.model

BUDGET = 24


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_it_loads_a_draft(smollm2_gguf: Path, tmp_path: Path, kind: str) -> None:
    """Of the architecture `dflash`, upstream's: every tensor is there and has the size that it expects."""
    path, loaded = tmp_path / "draft.gguf", pair.load("smollm2")
    assert loaded.draft is not None
    place = str(Path(peers.__file__).parent / "assets" / "smollm2")
    assert main(["convert", place, str(path), "--format", "gguf", "--type", kind, "--target", "smollm2"]) == 0
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    assert model
    assert llama_cpp.llama_model_n_layer(model) == loaded.draft.config.num_layers
    assert llama_cpp.llama_model_n_embd(model) == loaded.draft.config.hidden_size
    llama_cpp.llama_model_free(model)


def test_it_decodes_a_target_that_we_wrote(smollm2_gguf: Path) -> None:
    loaded = pair.load("smollm2", "none")
    prompt = loaded.target.tokenizer.chat([{"role": "user", "content": "Name three colours."}])
    ours = decode.complete(loaded.models, [prompt], Options(Fixed(1)), max_new_tokens=BUDGET)
    theirs = peers.Peers(loaded, ("llamacpp",)).answer("llamacpp", prompt, BUDGET, ())
    assert theirs.tokens == ours.tokens[0]
    assert min(*theirs.prefill, *theirs.decoding) > 0
