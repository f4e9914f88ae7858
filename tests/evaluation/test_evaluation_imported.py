"""Images made elsewhere as an attack: read by content, held to the budget, judged; what is missing is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from evaluation_toys import toy_classifier, toy_photos, toy_run
from safetensors.torch import save_file

import react_clip as rc
from react_clip import storage
from react_clip.attacks import PGD, Imported

ALONE: dict[str, Any] = {"defenses": {"CLIP": rc.Undefended()}, "seeds": (), "self_check": False}


@pytest.fixture(scope="module")
def crafted() -> Any:
    """Photos and images that another program might have made."""
    x, y = toy_photos(16)
    return x, PGD(eps=4 / 255, steps=3)(toy_classifier(), x, y, seed=0).images


@pytest.fixture
def folder(crafted: Any, tmp_path: Path) -> Path:
    return Imported.write(tmp_path / "theirs", *crafted).parent


def imported_run(place: Path, folder: Path, **options: Any) -> Any:
    attack = Imported(folder=str(folder), **{"eps": 4 / 255, **options})
    return toy_run(place, attacks={"theirs": attack}, data=toy_photos(16), **ALONE)


def test_imported_images_are_those_of_the_attack_that_made_them(folder: Path, tmp_path: Path) -> None:
    theirs = imported_run(tmp_path / "imported", folder)
    ours = toy_run(tmp_path / "own", attacks={"theirs": PGD(eps=4 / 255, steps=3)}, data=toy_photos(16), **ALONE)
    wanted = ["attack", "eps", "index", "attacked", "plain_prediction", "prediction", "robust"]
    assert theirs.images[wanted].equals(ours.images[wanted])


def test_a_tensor_file_holds_the_same_images(folder: Path, crafted: Any, tmp_path: Path) -> None:
    save_file({"images": (255 * crafted[1]).round().byte()}, folder / "all.safetensors")
    path = folder / "manifest.json"
    listed = json.loads(path.read_text())["images"]
    rows = {digest: f"all.safetensors#{number}" for number, digest in enumerate(listed)}
    digests = {"all.safetensors": storage.sha256_of(folder / "all.safetensors")}
    before = imported_run(tmp_path / "run", folder).images
    path.write_text(json.dumps({"images": rows, "sha256": digests}))
    assert imported_run(tmp_path / "other", folder).images.equals(before)


def test_other_images_in_the_same_folder_are_another_attack(folder: Path, tmp_path: Path) -> None:
    before = imported_run(tmp_path / "run", folder)
    photos = toy_photos(16)[0]
    for file in folder.iterdir():
        file.unlink()
    Imported.write(folder, photos, photos)
    after = imported_run(tmp_path / "run", folder)
    assert after.attacks[0].success_rate == 0 < before.attacks[0].success_rate


def change(folder: Path, **entries: Any) -> None:
    manifest = folder / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), **entries}))


@pytest.mark.parametrize(
    ("prepare", "error"),
    [
        (lambda folder: change(folder, images={}), "has no image of the photo with SHA-256"),
        (lambda folder: change(folder, sha256={}), r"\d\.png has another hash than in the manifest"),
        (lambda folder: [path.unlink() for path in folder.glob("*.png")], r"\d\.png is missing"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "is not a mapping of Manifest"),
        (lambda folder: (folder / "manifest.json").unlink(), r"manifest\.json does not exist"),
    ],
)
def test_what_is_missing_or_changed_is_named(folder: Path, tmp_path: Path, prepare: Any, error: str) -> None:
    prepare(folder)
    with pytest.raises(rc.ReactClipError, match=error):
        imported_run(tmp_path / "run", folder)
    assert not (tmp_path / "run" / "result.json").exists(), "nothing is reported"


def test_images_beyond_the_budget_and_folders_in_use_are_refused(folder: Path, crafted: Any, tmp_path: Path) -> None:
    with pytest.raises(rc.ReactClipError, match=r"imported-theirs left its budget .* exceeds the budget by 0.01176"):
        imported_run(tmp_path / "run", folder, eps=1 / 255)
    with pytest.raises(rc.ReactClipError, match="is there already"):
        Imported.write(folder, *crafted)
    with pytest.raises(rc.ReactClipError, match="imported needs 'folder'"):
        rc.attacks.from_dict("imported")
