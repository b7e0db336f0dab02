"""The flags of the command line. Nothing here imports JAX, so that `--help` is quick.

Field names are flags (`max_new_tokens` is `--max-new-tokens`); the text under a field is its help.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.constructors import PrimitiveConstructorSpec


@dataclass(frozen=True, kw_only=True)
class Models:
    target: str
    """A Hugging Face folder, a .gguf file, a hub id (org/name[@revision]) or a short name (smollm2)."""

    draft: str | None = None
    """A draft, likewise, or "none". Without it a short name uses the draft that it ships, if any, and
    anything else decodes autoregressively."""

    dtype: Literal["float32", "bfloat16"] | None = None
    """Of weights and caches. Default: float32 on a CPU, bfloat16 elsewhere."""

    device: str | None = None
    """cpu, gpu, tpu, or one of several: gpu:1. Default: JAX's choice."""

    rope_theta: float | None = None
    """Base of the draft's RoPE, where its file has it wrong (as files of Luce's converter may)."""

    draft_causal: Literal["all", "none", "sliding"] | None = None
    """The draft's layers in which a row of the block sees earlier rows only, where its file has that wrong."""

    draft_vocabulary: int | None = None
    """The draft chooses among this many token ids, the first ones, which most tokenizers give to frequent pieces. It
    gets cheaper, and rare tokens are never among its candidates (too few ids: fewer tokens a round); the target still
    chooses among all. 2 or more; 0 is all. Default: the short name's (smollm2: 8192) with its own draft, else all."""

    debug: bool = False
    """Show tracebacks and all log messages."""


@dataclass(frozen=True, kw_only=True)
class Decoding:
    max_new_tokens: int = 128
    """Budget of new tokens."""

    block_size: int | None = None
    """Rows of a block, the anchor included: 2 to what the draft was trained with, its default."""

    mode: Literal["chain", "tree"] | None = None
    """chain: one candidate for every position of a block. tree: the most likely prefixes of several. Same text.
    Default: the short name's, else chain."""

    tree_budget: int | None = None
    """Candidates of a tree, the anchor excluded. Default: the short name's, else 8, the best on a CPU;
    where rows are cheap, more pay."""

    tree_chain_seed: bool = False
    """Put the best chain into the tree first (needs a budget of at least block size - 1)."""

    tree_temperature: float = 1.0
    """Divides the draft's logits before candidates are ranked."""

    temperature: float = 0.0
    """0 is greedy. The same seed gives the same text, with and without a draft."""

    top_p: float = 1.0
    """Sample from the smallest set of tokens with this probability; 1 is off."""

    top_k: int = 0
    """Sample from this many tokens; 0 is off."""

    seed: int = 0
    """Of sampling."""

    stop: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """End the output before this text. May be given several times."""

    policy: Literal["fixed", "adaptive"] | None = None
    """adaptive: what is drafted follows what was accepted lately, what is verified also the draft's confidence,
    by the most tokens a second at the times measured on this device. Default: the short name's, else fixed."""

    chunk_size: int = 512
    """The prompt is read in pieces of at most this many tokens; any value gives the same result."""

    proposal: Literal["argmax", "sample"] = "argmax"
    """How the draft picks candidates. sample: exact in distribution, not token by token."""

    draft_window: int | None = None
    """The draft sees only this many of the last positions: its context stops growing. Same text; with fewer than the
    draft was trained for, fewer tokens a round. Default: all."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    draft_device: str | None = None
    """The draft on another device than the target, as in --device: cpu:1. Steps through the rounds from Python."""

    embedding: Literal["device", "host"] = "device"
    """host: the target's embedding table stays in host memory, rows are looked up there. Saves its size on the device,
    unless it is the head too. Steps through the rounds from Python."""


@dataclass(frozen=True, kw_only=True)
class _Prompt:
    prompt: str | None = None
    """The user's message, or the text to continue with --raw."""

    prompt_file: str | None = None
    """The same from a UTF-8 file; - is standard input. One newline at its end is left out."""

    system: str | None = None
    """A system message in front."""

    raw: bool = False
    """The prompt as it is, without the model's chat format."""


@dataclass(frozen=True, kw_only=True)
class _Output:
    verify: Literal["batched", "sequential"] = "batched"
    """sequential: one-row forwards, the debugging reference (slow)."""

    bonus: Literal["implicit", "explicit"] = "implicit"
    """explicit: forward a round's last token at once (slow)."""

    rollback: Literal["tape", "states", "replay"] = "tape"
    """What a verify keeps of recurrent layers (hybrid targets): a tape, or the state after every token. replay:
    keep nothing and forward the accepted tokens again, the debugging reference (slow)."""

    prefill: Literal["tokens", "layers"] = "tokens"
    """tokens: each chunk of the prompt through all layers; layers: all chunks through one layer, then the
    next (keeps the whole prompt's hidden states)."""

    logprobs: bool = False
    """Also give the log-probability of every token (of the target, before temperature and filters)."""

    trace: Path | None = None
    """Write what every round saw to this JSON file (infer/trace.py describes it)."""

    stream: bool = False
    """Show the text as it comes."""

    json: bool = False
    """Print one JSON object instead of the text."""


@dataclass(frozen=True, kw_only=True)
class Generate(_Output, Placement, Decoding, _Prompt, Models):
    """Complete one prompt.

    python -m infer generate --target smollm2 --prompt "Why is the sky blue?"

    python -m infer generate --target model.gguf --draft draft-folder --prompt-file question.txt --stream

    python -m infer generate --target org/name@revision --prompt "Once upon" --raw --temperature 0.8 --seed 1

    python -m infer generate --target smollm2 --prompt "Count to ten." --json | python -m json.tool
    """


@dataclass(frozen=True, kw_only=True)
class Chat(Placement, Decoding, Models):
    """Talk to a model: several turns on one state, earlier ones are not read again.

    python -m infer chat --target smollm2

    Lines of standard input are turns; /reset forgets the conversation, /quit leaves.
    """

    system: str | None = None
    """A system message in front of the conversation."""


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """Say what a file is: family, shapes, taps, mask id, rope, block, memory, and what is wrong with it.
    Nothing is loaded. Exit status 2 when it cannot be used.

    python -m infer inspect smollm2

    python -m infer inspect draft.gguf --target target-folder
    """

    path: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="PATH")]
    """A folder, a .gguf file, a hub id or a short name; a target or a draft."""

    target: str | None = None
    """Check that a draft belongs to this target: sizes, depth, vocabulary, mask id, taps, tokenizer."""

    debug: bool = False
    """Show tracebacks and all log messages."""


@dataclass(frozen=True, kw_only=True)
class Convert:
    """Write a draft, or a target, as another kind of file. A draft (a target) at DST is replaced, nothing else.

    python -m infer convert draft-folder draft.gguf --format gguf --type Q8_0 --target target.gguf

    python -m infer convert draft.gguf draft-folder --format hf --target target-folder
    """

    src: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SRC")]
    """A folder, a .gguf file of any family, or a hub id."""

    dst: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DST")]
    """The folder (hf) or file to write."""

    format: Literal["hf", "gguf", "gguf-luce"]
    """hf: a Hugging Face folder. gguf: as llama.cpp reads it. gguf-luce: as Luce's runtime reads it (drafts)."""

    type: Literal["F32", "F16", "BF16", "Q8_0", "Q4_0"] | None = None
    """Of the matrices; norms stay in float32 in GGUF. Default: the source's, or BF16 where the format lacks it."""

    target: str | None = None
    """The draft's target: says what a GGUF draft leaves out, and gives its tokenizer to the file."""

    rope_theta: float | None = None
    """Base of the draft's RoPE, where the source has it wrong (as files of Luce's converter may)."""

    draft_causal: Literal["all", "none", "sliding"] | None = None
    """The draft's layers in which a row of the block sees earlier rows only, where the source has that wrong."""

    debug: bool = False
    """Show tracebacks and all log messages."""


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Both decoders side by side on a few prompts: speed, acceptance, and whether the tokens agree.

    python -m infer demo

    python -m infer demo --target target-folder --draft draft-folder --max-new-tokens 32
    """

    target: str = "smollm2"
    """As in generate."""

    draft: str | None = None
    """As in generate. For a target without one an untrained draft is made: correct, and slow."""

    block_size: int | None = None
    """Rows of a block; the draft's by default."""

    max_new_tokens: int = 64
    """Budget of each answer."""

    dtype: Literal["float32", "bfloat16"] | None = None
    """As in generate."""

    device: str | None = None
    """As in generate."""

    debug: bool = False
    """Show tracebacks and all log messages."""


@dataclass(frozen=True, kw_only=True)
class Check(Models):
    """Check that decoding is lossless: every decoder against autoregressive, token by token.

    Greedy and sampled, alone and in batches. Exit status 1 when a token differs by more than a near-tie.
    Without a draft an untrained one is made.

    python -m infer check --target smollm2 --prompts prompts.jsonl --max-samples 20

    python -m infer check --target smollm2 --draft draft-folder --prompts prompts.jsonl --out check.json

    python -m infer check --target tiny-hybrid --draft draft-folder --prompts prompts.jsonl --every-mode
    """

    prompts: Path
    """JSONL, one prompt a line: {"turns": ["..."]} or {"prompt": "..."}."""

    max_samples: int = 20
    """At most this many prompts, spread evenly over the file."""

    max_prompt_tokens: int = 256
    """Longer prompts are left out, so that one capacity serves all."""

    max_new_tokens: int = 64
    """Budget of each answer."""

    block_size: int | None = None
    """Rows of a block; the draft's by default."""

    temperatures: tuple[float, ...] = (0.0, 0.8)
    """0 is greedy. Sampling uses fixed seeds."""

    batch: int = 4
    """Rows of the batched runs."""

    every_mode: bool = False
    """Also every rollback strategy, verify mode and bonus mode, in chains and in trees (in batches; slow)."""

    tree_budget: int = 16
    """Candidates of the trees of --every-mode."""

    out: Path | None = None
    """Write the table and every difference to this JSON file."""


def _words(kind: type, what: str) -> PrimitiveConstructorSpec:
    """Values with commas or spaces between them."""
    return PrimitiveConstructorSpec(
        nargs="*",
        metavar=f"{what}[,{what}...]",
        instance_from_str=lambda given: tuple(
            kind(word) for part in given for word in part.split(",") if word
        ),
        is_instance=lambda value: isinstance(value, tuple) and all(isinstance(word, kind) for word in value),
        str_from_instance=lambda value: [",".join(map(str, value))],
    )


Words = Annotated[tuple[str, ...], _words(str, "NAME")]
Integers = Annotated[tuple[int, ...], _words(int, "INT")]


@dataclass(frozen=True, kw_only=True)
class Time(Models):
    """Time the parts: autoregressive steps, rounds by block size, and their stages alone.

    Medians of warm runs; figures of one call are comparable with each other only. `block N` is the compiled
    loop, `stages of block N` each stage as a program of its own. Without a draft of that block size an
    untrained one is made.

    python -m infer time --target smollm2 --block-sizes 4 8 --compare
    """

    block_sizes: Integers = (8, 16)
    """Blocks to time; above the draft's own size an untrained draft of the largest is used."""

    tree_budgets: Integers = ()
    """Also time rounds with trees of so many candidates, and what choosing them costs, for every block size."""

    new_tokens: int = 128
    """Tokens of each generation. Stop tokens are ignored."""

    prompt_tokens: int = 40
    """Tokens of the (arbitrary) prompt."""

    repeats: int = 5
    """Runs behind each median."""

    lengths: bool = False
    """Also time rounds at 100 and 4000 committed positions, in caches of 256 and 8192 (compiles for a minute)."""

    compare: bool = False
    """Also time transformers and PyPI dflash on the same weights (extra `parity`)."""

    out: Path | None = None
    """Write the figures to this JSON file."""


@dataclass(frozen=True, kw_only=True)
class Bench(Models):
    """Compare decoders on the same prompts: tokens/s, the ratio to autoregressive decoding, tau, losslessness.

    Every arm runs on every prompt, one after the other, so that a slow minute hits all; compiling is apart. With
    --out it writes results.json, table.md and plots there, and a killed run continues. Exit status 1 when an
    answer differs from the autoregressive one by more than a near-tie.

    python -m infer bench --target smollm2 --dataset prompts.jsonl --max-samples 40 --out bench

    python -m infer bench --target T --draft D --dataset gsm8k,mt-bench --compare chain,tree --tree-budgets 8,16,32
    """

    dataset: Words
    """JSONL files, one prompt a line ({"turns": ["..."]}, {"prompt": "..."} or {"messages": [...]}), or names: gsm8k,
    humaneval, mbpp, mt-bench. Of conversations the first turn."""

    max_samples: int = 20
    """At most this many prompts of each dataset, spread evenly over it."""

    max_prompt_tokens: int = 512
    """Longer prompts are left out, so that one capacity serves all."""

    raw: bool = False
    """The prompts as they are, without the model's chat format."""

    compare: Words = ("ar", "chain")
    """ar, chain, tree, adaptive, adaptive-tree. Autoregressive decoding (ar) always runs: the others are compared
    with it. Other implementations, with the same weights: dflash, transformers (extra parity), llamacpp (extra
    peers)."""

    block_sizes: Integers = ()
    """Blocks of the arms, anchor included: one arm each; adaptive ones get the largest. Default: the draft's."""

    tree_budgets: Integers = (8,)
    """Candidates of a tree, anchor excluded: one arm for each, at every block size."""

    tree_chain_seed: bool = False
    """As in generate, for every tree."""

    tree_temperature: float = 1.0
    """As in generate, for every tree."""

    max_new_tokens: int = 64
    """Budget of each answer."""

    temperature: float = 0.0
    """0 is greedy. Sampled with fixed seeds, so that the tokens can be compared all the same."""

    top_p: float = 1.0
    """As in generate."""

    top_k: int = 0
    """As in generate."""

    seed: int = 0
    """Of sampling."""

    repeats: int = 1
    """Runs of each arm on each prompt; the median counts."""

    stages: bool = False
    """Also time the stages of each arm's round alone, against what the device can do (compiles each)."""

    out: Path | None = None
    """Folder for results.json, table.md, the plots and the journal."""


@dataclass(frozen=True, kw_only=True)
class Synthetic:
    """Time a model without its weights: random ones of the published shape, acceptance forced.

    Autoregressive step, draft, verify and round by context and block size, and the speed-up that they mean for
    tau = 2 to 10. --preset gpu: three models in six minutes on one large GPU.

    python -m infer synthetic qwen3-8b --block-sizes 8,16 --contexts 1024,8192 --out synthetic

    python -m infer synthetic --preset gpu --out synthetic
    """

    models: Annotated[Words, tyro.conf.Positional] = ()
    """Names: smollm2-135m, llama-3.1-8b, qwen3-4b, qwen3-8b, qwen3-30b-a3b, qwen3.5-4b, qwen3.5-9b, qwen3.5-27b,
    qwen3.5-35b-a3b."""

    preset: Literal["gpu"] | None = None
    """Models and sizes for one large GPU, in six minutes. Without a GPU: a small model on the CPU."""

    block_sizes: Integers = (8, 16)
    """Rows of a block, anchor included."""

    contexts: Integers = (1024,)
    """Committed positions at which a round is timed."""

    draft_layers: int = 5
    """Of the draft, whose layers are as wide as the target's."""

    repeats: int = 5
    """Runs behind each median."""

    minutes: float = 60.0
    """Start no further size after this; what was timed is kept."""

    dtype: Literal["float32", "bfloat16"] | None = None
    """Of weights and caches. Default: float32 on a CPU, bfloat16 elsewhere."""

    device: str | None = None
    """cpu, gpu, tpu, or one of several: gpu:1. Default: JAX's choice."""

    out: Path | None = None
    """Folder for synthetic.json, synthetic.md and a plot, written after every size."""

    debug: bool = False
    """Show tracebacks and all log messages."""


# In the order of the overview.
COMMANDS: dict[str, type] = {
    "demo": Demo,
    "generate": Generate,
    "chat": Chat,
    "inspect": Inspect,
    "convert": Convert,
    "check": Check,
    "time": Time,
    "bench": Bench,
    "synthetic": Synthetic,
}
