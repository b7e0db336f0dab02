from __future__ import annotations

from pathlib import Path

import folders
import pytest

from dflash_jax import pair
from infer import costs
from infer.session import Session


@pytest.fixture(autouse=True, scope="session")
def _costs_of_tests(tmp_path_factory: pytest.TempPathFactory):
    """Times that tests measure stay out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setattr(costs, "cache_folder", lambda: folder)
        yield


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target: babbles. fluent: says "a" for ever. draft: agrees with fluent, hardly ever with target.
    plain: a target without a chat template."""
    root = tmp_path_factory.mktemp("models")
    folders.target(root / "target")
    folders.target(root / "fluent", says=ord("a"))
    folders.target(root / "plain", template=None)
    folders.draft(root / "draft")
    return root


@pytest.fixture(scope="session")
def session(models: Path) -> Session:
    return Session(pair.load(str(models / "target"), str(models / "draft")))


@pytest.fixture(scope="session")
def fluent(models: Path) -> Session:
    return Session(pair.load(str(models / "fluent"), str(models / "draft")))


@pytest.fixture(scope="session")
def plain(models: Path) -> Session:
    """The target of `session` without a draft."""
    return Session(pair.load(str(models / "target")))
