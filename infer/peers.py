"""The same work by others, in the same run: transformers, and the reference implementation (PyPI `dflash`).

Needs the extra `parity`. Both run with our parameters, written to a folder in Hugging Face's layout, in
float32 on the CPU, so that only the implementation differs.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dflash_jax.config import ConfigError, DraftConfig, TargetConfig
from dflash_jax.state import Models
from dflash_jax.weights import hf
from dflash_jax.weights.names import TARGET_HF
from dflash_jax.weights.tensors import flatten


def _torch_target(config: TargetConfig, params: Mapping[str, Any]) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    if config.family != "llama" or config.rope.type != "default" or config.rope.divisors:
        raise ConfigError("the comparison with transformers is written for plain llama targets (smollm2)")
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            tie_word_embeddings=config.tie_word_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
            max_position_embeddings=config.max_positions or 8192,
        )
    )
    tensors = {
        TARGET_HF.to_file(path): torch.from_numpy(np.array(leaf, np.float32))
        for path, leaf in flatten(params).items()
    }
    missing = model.load_state_dict(tensors, strict=False)
    assert not missing.unexpected_keys and set(missing.missing_keys) <= {"lm_head.weight"}
    return model.eval()


def _torch_draft(config: DraftConfig, params: Mapping[str, Any]) -> Any:
    from dflash import model as reference

    with tempfile.TemporaryDirectory() as folder:
        hf.save_draft(Path(folder), config, params, np.float32)
        return reference.DFlashDraftModel.from_pretrained(folder, dtype="float32").eval()


class Peers:
    """Built once per run: loading them costs seconds."""

    def __init__(self, models: Models):
        try:
            import torch
            from dflash import model as reference
        except ImportError as error:
            raise ConfigError(
                "comparing needs torch, transformers and dflash: pip install -e '.[parity]'"
            ) from error
        reference._cuda_time = time.perf_counter  # its statistics assume a GPU
        self.torch, self.reference = torch, reference
        self.target = _torch_target(models.target.config, models.target_params)
        self.draft = None
        if models.draft is not None:
            self.draft = _torch_draft(models.draft.config, models.draft_params)

    def transformers(self, prompt: Sequence[int], new_tokens: int, repeats: int) -> dict[str, float]:
        """`generate`, greedy, prefill included: tokens per second."""
        ids = self.torch.tensor([list(prompt)])
        times = []
        for _ in range(repeats + 1):
            start = time.perf_counter()
            with self.torch.inference_mode():
                out = self.target.generate(
                    ids, attention_mask=self.torch.ones_like(ids), do_sample=False,
                    max_new_tokens=new_tokens, min_new_tokens=new_tokens, pad_token_id=0,
                )  # fmt: skip
            times.append(time.perf_counter() - start)
            assert out.shape[1] == len(prompt) + new_tokens
        return {"tokens_per_second_with_prefill": new_tokens / statistics.median(times[1:])}

    def dflash(self, prompt: Sequence[int], size: int, new_tokens: int, repeats: int) -> dict[str, float]:
        """`dflash_generate`, greedy: milliseconds per round and the rest of its own statistics."""
        runs = [
            self.reference.dflash_generate(
                self.draft, target=self.target, input_ids=self.torch.tensor([list(prompt)]),
                max_new_tokens=new_tokens, stop_token_ids=None, block_size=size, return_stats=True,
            )
            for _ in range(repeats + 1)
        ][1:]  # fmt: skip
        per_round = [
            run.time_per_output_token * run.num_output_tokens / len(run.acceptance_lengths) for run in runs
        ]
        return {
            "round_ms": 1e3 * statistics.median(per_round),
            "rounds": len(runs[0].acceptance_lengths),
            "tau": statistics.mean(runs[0].acceptance_lengths),
            "tokens_per_second": 1 / statistics.median(run.time_per_output_token for run in runs),
        }
