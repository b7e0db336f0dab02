"""The settings of training: sections of configs/NAME.toml, overridden by flags.

    python -m train fit --config configs/smollm2.toml --objective.anchors 64

A section is a frozen dataclass here; its docstrings are the help of the flags. The file name is the
short name of the target (dflash_jax/shortnames.py reads its other sections).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dflash_jax import shortnames, tables
from dflash_jax.config import ConfigError


def _require(holds: bool, sentence: str) -> None:
    if not holds:
        raise ConfigError(sentence)


@dataclass(frozen=True)
class Synthesize:
    """Conversations that the target makes alone."""

    out: Path = Path("conversations.jsonl")
    """File of conversations, in the run's folder unless absolute; an existing one is continued."""
    conversations: int = 10_000
    """Stop at this many lines."""
    seconds: float | None = None
    """Stop after this long, whatever was made."""
    rows: int = 64
    """Batch size, shared between greedy and sampled answers to the same prompts."""
    prompt_tokens: int = 160
    """Budget of a user turn; longer ones are dropped."""
    answer_tokens: int = 256
    """Budget of an answer; longer ones are cut."""
    bare: float = 0.35
    """Share of user turns that begin with nothing; the others begin as people begin (train/prompts.py)."""
    prompt_temperature: float = 1.0
    prompt_top_p: float = 0.95
    temperatures: tuple[float, ...] = (0.2, 0.7)
    """Range of the sampled answers' temperatures."""
    answer_top_p: float = 0.9
    greedy: float = 0.5
    """Share of answers at temperature 0."""
    seed: int = 0

    def __post_init__(self) -> None:
        _require(self.rows > 0 and self.conversations > 0, "rows and conversations must be positive")
        _require(self.prompt_tokens > 0 and self.answer_tokens > 0, "budgets of tokens must be positive")
        _require(
            len(self.temperatures) == 2 and 0 < self.temperatures[0] <= self.temperatures[1],
            "temperatures must be two numbers above 0, [low, high]",
        )
        _require(
            self.prompt_temperature > 0, "prompt_temperature must be above 0: a greedy prior has one turn"
        )
        _require(
            0 < self.prompt_top_p <= 1 and 0 < self.answer_top_p <= 1, "a top_p is above 0 and at most 1"
        )
        _require(0 <= self.bare <= 1 and 0 <= self.greedy <= 1, "bare and greedy are shares, 0 to 1")


@dataclass(frozen=True)
class Regenerate:
    """Answers of the target to prompts of a file."""

    prompts: Path | None = None
    """JSONL: {"turns": [...]}, {"prompt": "..."} or {"messages": [...]} a line."""
    out: Path = Path("regenerated.jsonl")
    """File of conversations, in the run's folder unless absolute; an existing one is continued."""
    max_samples: int | None = None
    rows: int = 64
    answer_tokens: int = 1024
    temperature: float = 0.7
    top_p: float = 0.9
    top_k: int = 0
    draft: str | None = None
    """Speculate with this draft: same text, sooner."""
    seed: int = 0

    def __post_init__(self) -> None:
        _require(self.rows > 0 and self.answer_tokens > 0, "rows and answer_tokens must be positive")
        _require(self.max_samples is None or self.max_samples > 0, "max_samples must be positive")


@dataclass(frozen=True)
class Data:
    """Which conversations are seen, and how."""

    files: tuple[Path, ...] = (Path("conversations.jsonl"),)
    """JSONL files, in the run's folder unless absolute."""
    held_out: float = 0.02
    """Share of conversations (by prompt) that is never trained on."""
    turns: Literal["last", "all"] = "last"
    """Supervise the last answer, or every answer of a conversation."""
    reasoning: bool = True
    """Supervise the text between <think> and </think> too."""
    max_length: int = 3072
    """Longer conversations are cut."""
    widths: tuple[int, ...] | None = None
    """A conversation is padded to the smallest width that holds it. Default: chosen from the lengths, so that
    less than 15 % of the positions are padding."""
    tokens: int = 24_576
    """Positions of a microbatch: each width has tokens // width conversations."""
    seed: int = 0

    def __post_init__(self) -> None:
        _require(0 < self.held_out < 1, f"held_out is {self.held_out}: a share between 0 and 1")
        widths = (self.max_length,) if self.widths is None else self.widths
        _require(
            len(widths) > 0 and list(widths) == sorted(set(widths)) and widths[0] > 1,
            f"widths is {list(widths)}: ascending, each above 1",
        )
        _require(widths[-1] == self.max_length, "the last of widths must be max_length")
        _require(self.tokens >= self.max_length, "tokens must hold one conversation of max_length")


@dataclass(frozen=True)
class Features:
    """Where the target's hidden states come from."""

    source: Literal["online", "offline"] = "online"
    """online: the target's forward runs in every step. offline: read from the store, written once."""
    store: Path = Path("features")
    """Folder of the store, in the run's folder unless absolute."""


@dataclass(frozen=True)
class Model:
    """The draft. Its width, heads and vocabulary are the target's."""

    layers: int = 5
    block_size: int = 16
    taps: tuple[int, ...] | None = None
    """Target layers to look at; default: five, evenly spaced as in the reference."""
    mask_token_id: int | None = None
    """The token that fills a block; default: the tokenizer's mask token, else a reserved one."""
    window: int | None = None
    """Sliding window of all layers but the last; default: full attention."""
    start: Literal["target", "random"] = "target"
    """Begin as the target's last layers, or at random."""

    def __post_init__(self) -> None:
        _require(self.layers > 0, "layers must be positive")
        _require(self.block_size > 1, "block_size must be 2 or more: the anchor and one candidate")


@dataclass(frozen=True)
class Objective:
    loss: Literal["decay", "dpace"] = "decay"
    """decay: cross-entropy weighted exp(-(k-1)/gamma) (paper 3.4). dpace: weighted by what is accepted."""
    gamma: float | None = None
    """Decay over slots; default 7, 5, 4 for blocks of 16, 10, 8. inf: no decay."""
    anchors: int = 512
    """Blocks per conversation and step."""
    placement: Literal["random", "fixed"] = "random"
    """random: anew each time. fixed: every block_size-th token of the answer (an ablation)."""
    soft: float = 0.0
    """Share of the loss that follows the target's distribution, not the label."""
    soft_temperature: float = 1.0
    candidates: int = 0
    """Compare with this many frequent tokens, the batch's labels included, not the whole vocabulary; 0: all."""
    full_every: int = 8
    """With candidates: every this many steps the whole vocabulary."""
    chunk: int = 2048
    """Rows of logits that live at once."""

    def __post_init__(self) -> None:
        _require(self.anchors > 0 and self.chunk > 0, "anchors and chunk must be positive")
        _require(0 <= self.soft <= 1, f"soft is {self.soft}: a share, 0 to 1")
        _require(self.gamma is None or self.gamma > 0, "gamma must be above 0")
        _require(self.candidates >= 0 and self.full_every > 0, "candidates >= 0, full_every >= 1")


@dataclass(frozen=True)
class Optimizer:
    rate: float = 6e-4
    warmup: float = 0.04
    """Share of the steps over which the rate rises from 0; it falls as a cosine after that."""
    final: float = 0.01
    """The last rate over the highest."""
    clip: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.01


@dataclass(frozen=True)
class Run:
    folder: Path | None = None
    """Everything of a run: data, checkpoints, metrics, plots, export. Default: runs/NAME."""
    steps: int | None = None
    """Updates; default: as many as `epochs` take."""
    epochs: float = 6.0
    accumulate: int = 1
    """Microbatches per update."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the draft's activations; its master weights are float32 always."""
    target_dtype: Literal["float32", "bfloat16"] | None = None
    """Of the target's weights; default: float32 on a CPU, bfloat16 elsewhere."""
    remat: bool = True
    """Recompute attention in the backward pass: less memory, a little more time."""
    evaluate_every: int = 500
    """Steps between evaluations on held-out conversations."""
    evaluate_conversations: int = 64
    checkpoint_every: int = 500
    keep: int = 2
    """Checkpoints kept, beside the best."""
    log_every: int = 20
    init_from: Path | None = None
    """Begin with the weights of this draft (a folder), at step 0: a warm start, not a resume."""
    resume: bool = True
    """Continue from the run's last checkpoint when there is one."""
    tensorboard: bool = False
    """Also write TensorBoard events (extra `train`)."""
    seed: int = 0

    def __post_init__(self) -> None:
        _require(self.accumulate > 0 and self.keep > 0, "accumulate and keep must be positive")
        _require(self.steps is None or self.steps > 0, "steps must be positive")
        _require(self.epochs > 0, "epochs must be positive")
        for name in ("evaluate_every", "checkpoint_every", "log_every", "evaluate_conversations"):
            _require(getattr(self, name) > 0, f"{name} must be positive")


@dataclass(frozen=True)
class Mesh:
    """How devices share the work. Data parallel over all of them by default."""

    data: int = -1
    """Devices that see different conversations; -1: what `fsdp` leaves."""
    fsdp: int = 1
    """Devices that share each weight (of the draft and of the target)."""
    coordinator: str | None = None
    """host:port of process 0; several hosts run the same command with their own process_id."""
    processes: int | None = None
    process_id: int | None = None


@dataclass(frozen=True)
class LanguageModel:
    """A tiny target trained from plain text (`python -m train target`)."""

    text: tuple[Path, ...] = ()
    """Plain text files, or JSONL with {"text": "..."}."""
    library: bool = False
    """Also learn from the sources of Python's standard library, which every machine has."""
    out: Path = Path("target")
    """Folder, in the run's folder unless absolute."""
    prompts: int = 0
    """User turns that are kept from training and written to prompts.jsonl in the run's folder."""
    family: str = "qwen3"
    layers: int = 4
    hidden_size: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 384
    """Of the dense MLP."""
    interval: int = 4
    """Hybrid families: every so many layers, one has full attention; the others are gated delta layers."""
    key_heads: int = 2
    """Of a gated delta layer."""
    value_heads: int = 4
    """Of a gated delta layer, a multiple of key_heads."""
    key_dim: int = 32
    """Size of a key head."""
    value_dim: int = 32
    """Size of a value head."""
    experts: int = 8
    """Families with a mixture of experts: experts of a layer. (Nothing balances their use.)"""
    experts_per_token: int = 2
    expert_size: int = 96
    """Width of one expert, and of the one that every token uses where a family has it."""
    length: int = 256
    rows: int = 16
    steps: int = 1000
    rate: float = 3e-3
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "interval", "length", "rows", "steps"):
            _require(getattr(self, name) > 0, f"{name} must be positive")
        _require(self.rate > 0, "rate must be above 0")
        _require(self.prompts >= 0, "prompts must not be negative")


SECTIONS: dict[str, type] = {
    "synthesize": Synthesize,
    "regenerate": Regenerate,
    "data": Data,
    "features": Features,
    "model": Model,
    "objective": Objective,
    "optimizer": Optimizer,
    "run": Run,
    "mesh": Mesh,
    "language_model": LanguageModel,
}


@dataclass(frozen=True)
class Settings:
    """One file's sections. name: the file's. target: what dflash_jax.pair loads."""

    name: str
    target: str
    synthesize: Synthesize = field(default_factory=Synthesize)
    regenerate: Regenerate = field(default_factory=Regenerate)
    data: Data = field(default_factory=Data)
    features: Features = field(default_factory=Features)
    model: Model = field(default_factory=Model)
    objective: Objective = field(default_factory=Objective)
    optimizer: Optimizer = field(default_factory=Optimizer)
    run: Run = field(default_factory=Run)
    mesh: Mesh = field(default_factory=Mesh)
    language_model: LanguageModel = field(default_factory=LanguageModel)

    @property
    def folder(self) -> Path:
        return self.run.folder or Path("runs") / self.name

    def within(self, path: Path) -> Path:
        """A path of the settings: in the run's folder unless absolute."""
        return self.folder / path


def read(path: Path) -> Settings:
    """The training sections of a config; all others are checked by shortnames.read. Raises ConfigError
    that names the file, the key and the nearest known one."""
    place = shortnames.read(path).target
    values = tables.read(path)
    made: dict[str, Any] = {
        name: tables.section(kind, values[name], path, name)
        for name, kind in SECTIONS.items()
        if name in values
    }
    target = path.stem
    if path.resolve().parent != shortnames.CONFIGS:  # a short name is a file of configs/
        target = place.path or f"{place.repo}@{place.revision}"
        _require(place.wheel is None, f"{path}: target.wheel: only a file of configs/ may name a wheel")
    return Settings(name=path.stem, target=target, **made)
