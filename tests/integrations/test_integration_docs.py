"""The examples of the document run, on the tiny CLIP in place of the large ones; nothing optional is imported early."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import react_clip as rc
import tiny_clip
from react_clip.defenses import react

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "integrations.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=["pipeline", "task", "open_clip", "chroma", "langchain"])
def test_the_examples_run(
    example: str,
    hf_folder: Path,
    checkpoint: Path,
    photos: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, photo in zip(("beach.jpg", "city.jpg"), photos, strict=False):
        shutil.copy(photo, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(react._CALIBRATIONS, str(hf_folder), None)
    for large, small in {
        '"openai/clip-vit-base-patch32"': repr(str(hf_folder)),
        '"ViT-B-32-quickgelu"': repr(tiny_clip.OPEN_CLIP_NAME),
        'pretrained="openai"': f"pretrained={str(checkpoint)!r}",
    }.items():
        example = example.replace(large, small)
    space: dict[str, Any] = {}
    exec(example, space)
    if "answers" in space:
        assert [{entry["label"] for entry in answer} for answer in space["answers"]] == [{"beach", "city"}] * 2
    if "answer" in space:
        assert sum(entry["score"] for entry in space["answer"]) == pytest.approx(1)
    if "probabilities" in space:
        assert space["probabilities"].shape == (1, 2)
    if "found" in space:
        assert sorted(space["found"]["ids"][0]) == ["beach.jpg", "city.jpg"]
    if "documents" in space:
        assert space["documents"][0].page_content in ("sand and sea", "streets and towers")


def test_importing_react_clip_imports_no_other_library() -> None:
    code = (
        "import sys, react_clip as rc; rc.integrations.drift_only; "
        "print(sorted({'transformers', 'open_clip', 'chromadb', 'langchain_core', 'torchvision'} & set(sys.modules)))"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert finished.stdout.strip() == "[]"


def test_every_listed_name_exists() -> None:
    assert sorted(rc.integrations.__all__) == dir(rc.integrations)
    for name in rc.integrations.__all__:
        assert getattr(rc.integrations, name).__name__ == name
    for module in (rc.integrations, rc.integrations.embeddings, rc.integrations.transformers_pipeline):
        with pytest.raises(AttributeError, match="nothing"):
            module.nothing  # noqa: B018
