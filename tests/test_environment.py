"""What Python and the system see of us: threads, forks, permissions of files, classes of errors, the log."""

from __future__ import annotations

import logging
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import react_clip as rc
from react_clip.environment import share_cores
from react_clip.optional import require
from react_clip.preprocess import read_image
from react_clip.storage import write_text
from toys import ToyEncoder, patch_encoder

VARIABLES = ("OMP_WAIT_POLICY", "OMP_NUM_THREADS")


@pytest.mark.parametrize(
    ("files", "threads"),
    [
        ({}, None),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "900000 100000\n"}, None),
        ({"cpu.max": "250000 100000\n"}, "2"),
        ({"cpu.max": "50000 100000\n"}, "1"),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, "3"),
    ],
)
def test_threads_follow_the_quota_of_a_container(
    files: dict[str, str], threads: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    share_cores(tmp_path)
    assert [os.environ.get(name) for name in VARIABLES] == ["PASSIVE", threads]
    monkeypatch.setattr(os, "environ", chosen := dict.fromkeys(VARIABLES, "of the user"))
    share_cores(tmp_path)
    assert os.environ == chosen | dict.fromkeys(VARIABLES, "of the user")


def _call(encoder: rc.Encoder, pixels: torch.Tensor, answers: Any) -> None:
    try:
        encoder(pixels)
        answers.put("computed")
    except rc.ReactClipError as error:
        answers.put(str(error))


@pytest.mark.process
def test_a_forked_process_is_refused_in_one_line() -> None:
    encoder = patch_encoder()
    pixels = torch.rand(64, 3, encoder.image_size, encoder.image_size)
    threads = torch.get_num_threads()
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    try:
        torch.set_num_threads(2)
        encoder(pixels)
        process = context.Process(target=_call, args=(encoder, pixels, answers))
        process.start()
        said = answers.get(timeout=60)
        process.join()
    finally:
        torch.set_num_threads(threads)
    assert said.startswith("this process was forked after an encoder had computed")
    assert "get_context('spawn')" in said


def test_new_files_have_the_permissions_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "new.txt", "text")
    finally:
        os.umask(before)
    assert (tmp_path / "new.txt").stat().st_mode & 0o777 == 0o640
    assert [path.name for path in tmp_path.iterdir()] == ["new.txt"]


def test_missing_files_and_packages_raise_what_python_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for call in (
        lambda: read_image(tmp_path / "nowhere.jpg"),
        lambda: rc.ZeroShotClassifier.from_folder(ToyEncoder(), tmp_path / "nowhere"),
        lambda: rc.ReACT.load(tmp_path / "nowhere.json"),
        lambda: rc.load(tmp_path / "nowhere"),
    ):
        with pytest.raises(FileNotFoundError, match="nowhere") as raised:
            call()
        assert isinstance(raised.value, rc.ReactClipError)
    (tmp_path / "broken_package.py").write_text("raise ImportError('libpart.so: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    for package, says in (
        ("no_such_package.part", r"this needs no_such_package, which is missing; .*pip install -e"),
        ("broken_package", r"cannot be imported \(libpart.so: cannot open shared object file\); .*pip"),
    ):
        with pytest.raises(ImportError, match=says) as missing:
            require(package, "this", extra="eval")
        assert isinstance(missing.value, rc.ReactClipError)


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
