"""The examples of the document run, on the tiny CLIP in place of the large ones."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import tiny_clip
from react_clip import ReACT

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "integrations.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)


@pytest.mark.docs
def test_the_examples_run(
    hf_folder: Path, open_clip_weights: Path, photos: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file, photo in zip(("beach.jpg", "city.jpg"), photos, strict=False):
        shutil.copy(photo, tmp_path / file)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(ReACT.constants, str(hf_folder), "")
    space: dict[str, Any] = {}
    for example in EXAMPLES:
        for large, small in {
            '"openai/clip-vit-base-patch32"': repr(str(hf_folder)),
            '"ViT-B-32-quickgelu"': repr(tiny_clip.OPEN_CLIP_NAME),
            'pretrained="openai"': f"pretrained={str(open_clip_weights)!r}",
        }.items():
            example = example.replace(large, small)
        exec(example, space)
    assert [{row["label"] for row in answer} for answer in space["answers"]] == 2 * [{"beach", "city"}]
    assert space["probabilities"].shape == (1, 2)
    assert sorted(space["found"]["ids"][0]) == ["beach.jpg", "city.jpg"]
    assert space["documents"][0].page_content in ("sand and sea", "streets and towers")
