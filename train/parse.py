"""From arguments to a command and its settings: a config file, overridden by flags."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dflash_jax import command_line, shortnames
from dflash_jax.config import ConfigError
from train import settings
from train.settings import Settings

PROGRAM = "python -m train"

# In the order in which a draft is made.
COMMANDS = {
    "target": "Train a tiny target from plain text: for tests and trying things out, not for use.",
    "synthesize": "Conversations that the target makes alone: user turns from its own prior, then answers.",
    "regenerate": "Answers of the target to the prompts of a file.",
    "features": "Write the target's hidden states once, so that training does not compute them again.",
    "fit": "Train a draft: checkpoints, metrics, plots, and the best draft exported with a model card.",
    "evaluate": "Measure a draft: accuracy by position, simulated tau and recall; tau in the real decoder.",
    "export": "Write a checkpoint of a run as a draft folder that z-lab's code, vLLM and SGLang read.",
}
EXAMPLES = """\
  python -m train synthesize --config configs/tiny.toml
  python -m train fit --config configs/tiny.toml --objective.anchors 32 --run.steps 200
  python -m train evaluate --config configs/tiny.toml --draft runs/tiny/draft"""


@dataclass(frozen=True)
class Request:
    """command: a key of COMMANDS. draft: for evaluate and export, None is the run's own. prompts: for
    evaluate, the file of prompts that the real decoder is given."""

    command: str
    settings: Settings
    draft: str | None = None
    prompts: Path | None = None
    out: Path | None = None
    debug: bool = False


def parse(arguments: list[str]) -> Request:
    """Raises ConfigError for what is missing, unknown or of the wrong type; prints help and exits with
    status 0 when asked to."""
    name = arguments[0] if arguments else ""
    command_line.command(name, COMMANDS, PROGRAM, overview)
    own, rest = _own(arguments[1:])
    config = own.pop("config", None)
    if config is None:
        if "-h" in rest or "--help" in rest:
            base = Settings(name="NAME", target="")
        else:
            raise ConfigError(f"--config is missing: {PROGRAM} {name} --config configs/NAME.toml")
    else:
        base = settings.read(find(config))
    made = command_line.flags(Settings, f"{PROGRAM} {name}", rest, default=base)
    debug = own.pop("debug", None) is not None
    paths = {key: Path(value) for key, value in own.items() if key in ("prompts", "out")}
    return Request(name, made, own.get("draft"), debug=debug, **paths)


def find(name: str) -> Path:
    """A file, or the short name of one in configs/."""
    path = Path(name)
    if path.suffix != ".toml" and name in shortnames.names():
        return shortnames.CONFIGS / f"{name}.toml"
    if not path.is_file():
        raise ConfigError(f"{name}: no such config file; short names are {', '.join(shortnames.names())}")
    return path


def _own(arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    """The flags that are not settings, and the others."""
    own: dict[str, str] = {}
    rest: list[str] = []
    waiting = list(arguments)
    while waiting:
        word = waiting.pop(0)
        flag, equals, value = word.partition("=")
        if flag == "--debug":
            own["debug"] = ""
        elif flag in ("--config", "--draft", "--prompts", "--out"):
            if not equals and not waiting:
                raise ConfigError(f"{flag} needs a value")
            own[flag[2:]] = value if equals else waiting.pop(0)
        else:
            rest.append(word)
    return own, rest


def overview() -> str:
    lines = ["Training of DFlash drafts: data from the target itself, blocks at random anchors.", ""]
    lines += [f"usage: {PROGRAM} COMMAND --config configs/NAME.toml [--section.key value ...]", ""]
    lines += [f"  {name:12}{what}" for name, what in COMMANDS.items()]
    lines += ["", EXAMPLES, ""]
    lines += [
        "  --config   a TOML file, or its name in configs/",
        "  --draft    evaluate, export: a draft's folder or a checkpoint; default: the run's best",
        "  --prompts  evaluate: JSONL of prompts for the real decoder",
        "  --out      export: folder; evaluate: JSON file",
        "  --debug    tracebacks and all log messages",
    ]
    return "\n".join([*lines, "", f"All settings: {PROGRAM} COMMAND --config configs/NAME.toml --help"])
