"""The folder of plans that were made before: never needed, and said to be missing once."""

from __future__ import annotations

from pathlib import Path

import platformdirs
import pytest

from autopar.driver.gate import plan_cache
from autopar.errors import CacheWarning
from autopar.ir import files


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_warned", set())


def test_the_folder_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda _: tmp_path / "autopar")
    assert plan_cache.default_folder() == tmp_path / "autopar" / "plans"


def test_a_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no folder is in its way, for root too."""
    (tmp_path / "autopar").write_text("a file")
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda _: tmp_path / "autopar")
    with pytest.warns(CacheWarning, match="plans cannot be kept .*XDG_CACHE_HOME") as heard:
        assert plan_cache.default_folder() is None
        assert plan_cache.default_folder() is None
    assert len(heard) == 1


def test_a_folder_that_can_only_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "autopar" / "plans"
    folder.mkdir(parents=True)

    def refuse(**_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(platformdirs, "user_cache_path", lambda _: tmp_path / "autopar")
    monkeypatch.setattr(plan_cache, "TemporaryFile", refuse)
    with pytest.warns(CacheWarning, match="Read-only file system"):
        assert plan_cache.default_folder() == folder


def test_a_user_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is made under the folder one happens to be in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda _: Path("~/.cache/autopar"))
    with pytest.warns(CacheWarning, match="no home folder"):
        assert plan_cache.default_folder() is None
    assert not [*tmp_path.iterdir()]
