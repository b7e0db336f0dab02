"""The same work by others, for comparison: transformers, the reference implementation (PyPI `dflash`), llama.cpp.

All run with our parameters, written to files of their formats in the pair's dtype, on the pair's device, so that only
the implementation differs. None of them is imported before it is asked for: they need the extra `parity`, llama.cpp
the extra `peers`. Greedy decoding only.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dflash_jax.config import ConfigError
from dflash_jax.pair import DTYPES, Pair
from dflash_jax.sources import find_target
from dflash_jax.weights import gguf_export, hf
from infer.machine import cores

DFLASH = "dflash"
NAMES = ("transformers", DFLASH, "llamacpp")
_PACKAGES = {"transformers": "transformers", DFLASH: "dflash", "llamacpp": "llama_cpp_python"}

Instant = tuple[float, float]  # seconds of wall clock, and of the CPU time of this process


@dataclass(frozen=True)
class Answer:
    """tokens: the output. prefill, decoding: what came before and after its first token. committed: of each round."""

    tokens: list[int]
    prefill: Instant
    decoding: Instant
    committed: list[int]


class Peers:
    """Loads each of `names` once: it costs seconds, and memory for another copy of the weights."""

    def __init__(self, pair: Pair, names: Sequence[str]):
        self._pair, self._names = pair, tuple(names)
        self._run: dict[str, Callable[..., Answer]] = {}
        try:
            if {"transformers", DFLASH} & set(names):
                self._load_torch()
            if "llamacpp" in names:
                self._run["llamacpp"] = _LlamaCpp(pair).answer
        except ImportError as error:
            extra = "peers" if error.name == "llama_cpp" else "parity"
            raise ConfigError(
                f"comparing with {', '.join(names)} needs {error.name}: pip install -e '.[{extra}]'"
            ) from error

    def _load_torch(self) -> None:
        target = _TorchTarget(self._pair)
        self._run["transformers"] = target.answer
        if DFLASH in self._names:
            self._run[DFLASH] = _TorchDraft(self._pair, target).answer

    def answer(
        self, name: str, prompt: Sequence[int], new_tokens: int, stop_ids: Sequence[int], block_size: int = 1
    ) -> Answer:
        """At most new_tokens tokens, ending with one of stop_ids (no stop_ids: exactly new_tokens)."""
        return self._run[name](list(prompt), new_tokens, list(stop_ids), block_size)

    def versions(self) -> dict[str, str]:
        packages = [_PACKAGES[name] for name in self._names] + ["torch"] * ("transformers" in self._run)
        return {name: version(name) for name in sorted(packages)}


def _since(start: Instant, end: Instant) -> Instant:
    return end[0] - start[0], end[1] - start[1]


class _TorchTarget:
    """transformers, `generate` with its dynamic cache."""

    def __init__(self, pair: Pair):
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.torch, self.place = torch, _torch_device(torch, pair)
        self.dtype = getattr(torch, pair.dtype)
        with tempfile.TemporaryDirectory() as folder:
            hf.save_target(Path(folder), pair.target.config, _on_host(pair.target.params), DTYPES[pair.dtype])
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=self.dtype)
        self.model = model.to(self.place).eval()
        self.model.generation_config.eos_token_id = None  # what ends an answer is said with each

    def now(self) -> Instant:
        if self.place == "cuda":
            self.torch.cuda.synchronize()
        return time.perf_counter(), time.process_time()

    def ids(self, prompt: list[int]) -> Any:
        return self.torch.tensor([prompt], device=self.place)

    def answer(self, prompt: list[int], new_tokens: int, stop_ids: list[int], _: int) -> Answer:
        ids, watch = self.ids(prompt), _FirstToken(self.now)
        more = {"eos_token_id": stop_ids} if stop_ids else {"min_new_tokens": new_tokens}
        begin = self.now()
        with self.torch.inference_mode():
            out = self.model.generate(
                ids, attention_mask=self.torch.ones_like(ids), do_sample=False, max_new_tokens=new_tokens,
                pad_token_id=0, streamer=watch, **more,
            )  # fmt: skip
        end = self.now()
        tokens = out[0, len(prompt) :].tolist()
        first = watch.first or end
        return Answer(tokens, _since(begin, first), _since(first, end), [1] * (len(tokens) - 1))


class _FirstToken:
    """A streamer that notes when the first token came. `generate` gives it the prompt before."""

    def __init__(self, now: Callable[[], Instant]):
        self._now, self._calls = now, 0
        self.first: Instant | None = None

    def put(self, _: Any) -> None:
        self._calls += 1
        if self._calls == 2:
            self.first = self._now()

    def end(self) -> None:
        pass


class _TorchDraft:
    """PyPI `dflash`, `dflash_generate`."""

    def __init__(self, pair: Pair, target: _TorchTarget):
        from dflash import model as reference

        if pair.draft is None:
            raise ConfigError("comparing with dflash needs a draft, and there is none: give one with --draft")
        self.reference, self.target = reference, target
        with tempfile.TemporaryDirectory() as folder:
            hf.save_draft(Path(folder), pair.draft.config, _on_host(pair.draft.params), DTYPES[pair.dtype])
            draft = reference.DFlashDraftModel.from_pretrained(folder, dtype=target.dtype)
        self.draft = draft.to(target.place).eval()

    def answer(self, prompt: list[int], new_tokens: int, stop_ids: list[int], block_size: int) -> Answer:
        instants: list[Instant] = []

        def clock() -> float:
            """Its own is CUDA's. It asks four times: before and after the prompt, before and after decoding."""
            instants.append(self.target.now())
            return instants[-1][0]

        self.reference._cuda_time = clock
        run = self.reference.dflash_generate(
            self.draft, target=self.target.model, input_ids=self.target.ids(prompt),
            max_new_tokens=new_tokens, stop_token_ids=stop_ids or None, block_size=block_size,
            return_stats=True,
        )  # fmt: skip
        return Answer(
            run.output_ids[0, len(prompt) :].tolist(),
            _since(*instants[:2]),
            _since(*instants[2:]),
            list(run.acceptance_lengths),
        )


class _LlamaCpp:
    """llama.cpp through llama-cpp-python, autoregressive, with a cache in float32. A draft is not used."""

    def __init__(self, pair: Pair):
        import llama_cpp

        source = find_target(pair.target.source).target
        if not source.is_gguf:
            raise ConfigError(
                f"comparing with llamacpp needs a target from a .gguf file, whose vocabulary it can read: "
                f"{pair.target.source} is a folder"
            )
        kind = {"float32": "F32", "bfloat16": "BF16"}[pair.dtype]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "target.gguf"
            gguf_export.save_target(
                path, pair.target.config, _on_host(pair.target.params), kind,
                gguf_export.vocabulary(source.path),
            )  # fmt: skip
            self.model = llama_cpp.Llama(
                str(path), n_ctx=min(pair.target.config.max_positions or 4096, 4096), n_threads=cores(),
                n_threads_batch=cores(), type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32,
                n_gpu_layers=0 if pair.device.platform == "cpu" else -1, verbose=False,
            )  # fmt: skip

    def answer(self, prompt: list[int], new_tokens: int, stop_ids: list[int], _: int) -> Answer:
        self.model.reset()
        begin = time.perf_counter(), time.process_time()
        tokens: list[int] = []
        first = begin
        for token in self.model.generate(prompt, temp=0.0, repeat_penalty=1.0):
            if not tokens:
                first = time.perf_counter(), time.process_time()
            tokens.append(token)
            if len(tokens) == new_tokens or token in stop_ids:
                break
        end = time.perf_counter(), time.process_time()
        return Answer(tokens, _since(begin, first), _since(first, end), [1] * (len(tokens) - 1))


def _on_host(params: Any) -> Any:
    return jax.tree.map(np.asarray, params)


def _torch_device(torch: Any, pair: Pair) -> str:
    if pair.device.platform == "cpu":
        return "cpu"
    if not torch.cuda.is_available():
        raise ConfigError(f"torch sees no GPU here, and our models are on {pair.device}: add --device cpu")
    return "cuda"
