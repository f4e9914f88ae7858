"""Exported towers: the features of their source, every defence without gradients, nothing left of a failure."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import react_clip as rc
import tiny_clip
from programs import Run
from react_clip import attacks, defenses
from react_clip.cli import main
from react_clip.encoders import exported as exporting
from toys import write_photos


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_photos(tmp_path_factory.mktemp("photos"))


@pytest.fixture(scope="module")
def exported(tiny_folder: Path, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny CLIP, written by the command."""
    folder = tmp_path_factory.mktemp("exported") / "onnx"
    assert main(["export", str(tiny_folder), "--out", str(folder), "--photos", str(photos), "--quiet"]) == 0
    return folder


def pixels(count: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(count, 3, tiny_clip.SIZE, tiny_clip.SIZE, generator=torch.Generator().manual_seed(seed))


def test_features_are_those_of_the_tower_for_any_number_of_images(exported: Path, tiny_folder: Path) -> None:
    tower, graph = rc.load(tiny_folder, device="cpu"), rc.load(f"onnx:{exported}")
    for count in (1, 2, 7):
        images = pixels(count, seed=count)
        noisy = images * 3 - 1
        assert (graph(images) - tower(images)).abs().max() < 1e-5
        found, expected = (torch.cat(each.encode_several([noisy, noisy[..., :24, :24]])) for each in (graph, tower))
        assert (found - expected).abs().max() < 1e-5
    assert graph.size_near(176 / 224) == tower.size_near(176 / 224) == 24
    assert graph.token_fraction(24) == tower.token_fraction(24)
    assert graph.size_near(0.5) is None, "there is no graph for 16 pixels"
    assert (graph.image_size, graph.dim, graph.weights) == (tower.image_size, tower.dim, str(tiny_folder))
    assert not graph.has_text
    assert graph.fingerprint() != tower.fingerprint()
    assert graph.fingerprint() == rc.load(f"onnx:{exported}").fingerprint()
    record = json.loads((exported / "encoder.json").read_text())
    assert record["fingerprint"] == tower.fingerprint()
    assert 0 <= record["largest_difference"] < 1e-5


def test_defences_without_gradients_answer_as_on_the_tower(exported: Path, tiny_folder: Path) -> None:
    features = torch.randn(4, tiny_clip.DIM, generator=torch.Generator().manual_seed(1))
    classifiers = [
        rc.ZeroShotClassifier.from_features(rc.load(each, device="cpu"), list("abcd"), features)
        for each in (tiny_folder, f"onnx:{exported}")
    ]
    for defence in (rc.Undefended(), rc.ReACT(), defenses.TTE()):
        expected, found = (defence(clf, pixels(4), seed=0) for clf in classifiers)
        assert torch.equal(found.labels, expected.labels)
        assert torch.equal(found.passes, expected.passes)
        assert (found.features - expected.features).abs().max() < 1e-3
    images, labels = pixels(2), torch.tensor([0, 1])
    for needs_gradients in (
        lambda: attacks.PGD(eps=4 / 255, steps=2)(classifiers[1], images, labels, seed=0),
        lambda: defenses.TTC(tau=0.0)(classifiers[1], images, seed=0),
    ):
        with pytest.raises(rc.ReactClipError, match=f"gives no gradients; load '{tiny_folder}'"):
            needs_gradients()


def test_a_graph_that_differs_from_its_tower_is_not_kept(
    exported: Path, other_folder: Path, photos: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy_graph(encoder: rc.Encoder, path: Path, size: int) -> None:
        """An exporter that goes wrong: what it writes is sound, but the graph of another tower."""
        shutil.copy(exported / path.name, path)

    monkeypatch.setattr(exporting, "_write_graph", copy_graph)
    code, _, error = run("export", other_folder, "--out", tmp_path / "out" / "new", "--photos", photos, "--quiet")
    assert (code, "more than 0.0001; nothing was written" in error) == (2, True)
    assert list((tmp_path / "out").iterdir()) == []


def test_bad_requests_are_one_line(exported: Path, tiny_folder: Path, tmp_path: Path, run: Run) -> None:
    for arguments, says in (
        ([tiny_folder, "--out", tmp_path / "a", "--photos", tmp_path / "none.png"], "does not exist"),
        ([f"onnx:{exported}", "--out", tmp_path / "a"], "is an ExportedEncoder"),
    ):
        code, _, error = run("export", *arguments, "--quiet")
        assert (code, says in error) == (2, True)
    assert not (tmp_path / "a").exists()


def test_folders_that_are_not_what_was_exported_are_refused(exported: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(exported, copy)
    with pytest.raises(rc.ReactClipError, match=r"does not exist; .*export it again"):
        rc.load(f"onnx:{tmp_path / 'nothing'}")
    with pytest.raises(rc.ReactClipError, match="exported towers compute in fp32"):
        rc.load(f"onnx:{copy}", dtype="fp16")
    weights = bytearray((copy / "encoder.onnx").read_bytes())
    weights[len(weights) // 2] ^= 1
    (copy / "encoder.onnx").write_bytes(weights)
    with pytest.raises(rc.ReactClipError, match=r"encoder\.onnx is missing or not the file that encoder\.json"):
        rc.load(f"onnx:{copy}")
    (copy / "encoder.json").write_text("[]")
    with pytest.raises(rc.ReactClipError, match="is no record of an exported tower"):
        rc.load(f"onnx:{copy}")
