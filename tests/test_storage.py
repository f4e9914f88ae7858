"""Files: permissions of what is written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from react_clip.storage import write_text


def test_writing_leaves_the_umask_alone_and_follows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.umask(0o027)
    try:
        monkeypatch.setattr(os, "umask", lambda mask: pytest.fail("other threads would create files with this mask"))
        write_text(tmp_path / "new.txt", "text")
        write_text(tmp_path / "new.txt", "other text")
    finally:
        monkeypatch.undo()
        os.umask(before)
    assert (tmp_path / "new.txt").stat().st_mode & 0o777 == 0o640
    assert [path.name for path in tmp_path.iterdir()] == ["new.txt"]
