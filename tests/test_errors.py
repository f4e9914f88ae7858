"""Errors are also those that Python programs expect."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import react_clip as rc
from react_clip.optional import require
from react_clip.preprocess import read_image
from toys import ToyEncoder


def test_missing_files_and_packages_raise_what_python_raises(tmp_path: Path) -> None:
    for call in (
        lambda: read_image(tmp_path / "nowhere.jpg"),
        lambda: rc.ZeroShotClassifier.from_folder(ToyEncoder(), tmp_path / "nowhere"),
        lambda: rc.ReACT.load(tmp_path / "nowhere.json"),
    ):
        with pytest.raises(FileNotFoundError, match="nowhere") as raised:
            call()
        assert isinstance(raised.value, rc.ReactClipError)
    with pytest.raises(ImportError, match=r"this needs no_such_package, which is missing; .*pip install -e") as missing:
        require("no_such_package.part", "this", extra="eval")
    assert isinstance(missing.value, rc.ReactClipError)


def test_a_package_that_is_there_and_broken_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_package.py").write_text("raise ImportError('libpart.so: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=r"cannot be imported \(libpart.so: cannot open shared object file\); .*pip"):
        require("broken_package", "this", extra="eval")


def test_loading_does_not_switch_off_the_log_of_the_process(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import AutoConfig

    read = AutoConfig.from_pretrained

    def read_and_log(*args: object, **kwargs: object) -> object:
        logging.getLogger("somebody.else").warning("a line of another thread")
        logging.getLogger("transformers.hub").warning("a retry")
        return read(*args, **kwargs)

    monkeypatch.setattr(AutoConfig, "from_pretrained", read_and_log)
    rc.load(tiny_folder)
    assert {record.getMessage() for record in caplog.records} == {"a line of another thread"}
