"""Exported towers: the same features in both runtimes, every defence without gradients, nothing left of a failure."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import react_clip as rc
import tiny_clip
from programs import Run
from react_clip import attacks, defenses
from react_clip.choices import EXPORT_FORMATS
from react_clip.cli import main
from react_clip.encoders import exported as exporting
from toys import write_photos


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_photos(tmp_path_factory.mktemp("photos"))


@pytest.fixture(scope="module")
def exported(tiny_folder: Path, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny CLIP, written by the command for either runtime."""
    folder = tmp_path_factory.mktemp("exported")
    trace = torch.onnx.export

    def trace_once(module: torch.nn.Module, example: tuple[torch.Tensor], file: Path, **options: Any) -> None:
        """Both formats begin with the same ONNX file, which takes seconds to make."""
        made = folder / f"{example[0].shape[-1]}.onnx"
        if not made.exists():
            trace(module, example, made, **options)
        shutil.copy(made, file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.onnx, "export", trace_once)
        for kind in EXPORT_FORMATS:
            arguments = ["export", tiny_folder, "--format", kind, "--out", folder / kind, "--photos", photos, "--quiet"]
            assert main([str(argument) for argument in arguments]) == 0
    return {kind: folder / kind for kind in EXPORT_FORMATS}


@pytest.fixture(params=EXPORT_FORMATS)
def name(request: pytest.FixtureRequest, exported: dict[str, Path]) -> str:
    return f"{request.param}:{exported[request.param]}"


def pixels(count: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(count, 3, tiny_clip.SIZE, tiny_clip.SIZE, generator=torch.Generator().manual_seed(seed))


def test_features_are_those_of_the_tower_for_any_number_of_images(name: str, tiny_folder: Path) -> None:
    tower, graph = rc.load(tiny_folder, device="cpu"), rc.load(name)
    for count in (1, 2, 7):
        images = pixels(count, seed=count)
        assert (graph(images) - tower(images)).abs().max() < 1e-5
        noisy = images * 3 - 1
        assert (graph.encode_views(noisy) - tower.encode_views(noisy)).abs().max() < 1e-5
        small = noisy[..., :24, :24]
        assert (graph.encode_views(small) - tower.encode_views(small)).abs().max() < 1e-5
    assert graph.size_near(176 / 224) == tower.size_near(176 / 224) == 24
    assert graph.token_share(24) == tower.token_share(24)
    assert graph.size_near(0.5) is None, "there is no graph for 16 pixels"
    assert (graph.image_size, graph.dim, graph.base) == (tower.image_size, tower.dim, tower.base)
    assert graph.original == str(tiny_folder)
    assert not graph.has_text
    assert graph.fingerprint() != tower.fingerprint()
    assert graph.fingerprint() == rc.load(name).fingerprint()
    with pytest.raises(rc.ReactClipError, match=r"must lie in \[0, 1\]"):
        graph(noisy)


def test_defences_without_gradients_answer_as_on_the_tower(name: str, tiny_folder: Path) -> None:
    features = torch.randn(4, tiny_clip.DIM, generator=torch.Generator().manual_seed(1))
    classifiers = [
        rc.ZeroShotClassifier.from_features(rc.load(each, device="cpu"), list("abcd"), features)
        for each in (tiny_folder, name)
    ]
    for defence in (rc.Undefended(), rc.ReACT(), defenses.AOM(), defenses.TTE()):
        expected, found = (defence(clf, pixels(4), seed=0) for clf in classifiers)
        assert torch.equal(found.labels, expected.labels)
        assert torch.equal(found.passes, expected.passes)
        assert (found.features - expected.features).abs().max() < 1e-3


def test_what_needs_gradients_says_where_to_get_them(name: str, tiny_folder: Path) -> None:
    features = torch.randn(4, tiny_clip.DIM, generator=torch.Generator().manual_seed(1))
    clf = rc.ZeroShotClassifier.from_features(rc.load(name), list("abcd"), features)
    images, labels = pixels(2), torch.tensor([0, 1])
    for needs_gradients in (
        lambda: attacks.PGD(eps=4 / 255, steps=2)(clf, images, labels, seed=0),
        lambda: defenses.TTC(tau=0.0)(clf, images, seed=0),
    ):
        with pytest.raises(rc.ReactClipError, match="gives no gradients; load") as caught:
            needs_gradients()
        assert str(tiny_folder) in str(caught.value)
    assert attacks.Square(eps=4 / 255, queries=3)(clf, images, labels, seed=0).images.shape == images.shape


def test_the_record_says_what_was_exported(exported: dict[str, Path], tiny_folder: Path) -> None:
    for kind, folder in exported.items():
        record = json.loads((folder / "encoder.json").read_text())
        assert record["fingerprint"] == rc.load(tiny_folder, device="cpu").fingerprint()
        assert record["normalisation"] == "inside the graph"
        assert record["parity"]["images"] == 12
        assert 0 <= record["parity"]["max_difference"] < 1e-5
        graphs = [stem + ending for stem in ("encoder", "encoder-small") for ending in EXPORT_FORMATS[kind]]
        assert sorted(path.name for path in folder.iterdir()) == sorted([*graphs, "encoder.json"])


def test_a_graph_that_differs_from_its_tower_is_not_kept(
    exported: dict[str, Path],
    other_folder: Path,
    photos: Path,
    tmp_path: Path,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def copy_graph(encoder: rc.Encoder, kind: str, stem: Path, size: int) -> None:
        """An exporter that goes wrong: what it writes is sound, but the graph of another tower."""
        shutil.copy(exported["onnx"] / f"{stem.name}.onnx", f"{stem}.onnx")

    monkeypatch.setattr(exporting, "_write_graph", copy_graph)
    out = tmp_path / "out"
    code, _, error = run(
        "export", other_folder, "--format", "onnx", "--out", out / "new", "--photos", photos, "--quiet"
    )
    assert code == 2
    assert "more than 0.0001; nothing was written" in error
    assert error.count("\n") == 1
    assert list(out.iterdir()) == []


def test_bad_requests_are_one_line(exported: dict[str, Path], tiny_folder: Path, tmp_path: Path, run: Run) -> None:
    full, name = exported["onnx"], f"onnx:{exported['onnx']}"
    for arguments, says in (
        ([tiny_folder, "--out", full], "is there already; remove it"),
        ([tiny_folder, "--out", tmp_path / "a", "--tolerance", "0"], "--tolerance is 0"),
        ([tiny_folder, "--out", tmp_path / "a", "--photos", tmp_path / "none.png"], "does not exist"),
        ([name, "--out", tmp_path / "a"], "is an exported tower already"),
    ):
        code, _, error = run("export", *arguments, "--format", "onnx", "--quiet")
        assert code == 2
        assert says in error
        assert error.count("\n") == 1
    assert not (tmp_path / "a").exists()
    with pytest.raises(rc.ReactClipError, match="there is no format 'coreml'"):
        exporting.export(rc.load(tiny_folder, device="cpu"), "coreml", tmp_path / "a", pixels(1))


def test_folders_that_are_not_what_was_exported_are_refused(exported: dict[str, Path], tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(exported["openvino"], copy)
    with pytest.raises(rc.ReactClipError, match="in openvino format; load openvino:"):
        rc.load(f"onnx:{copy}")
    with pytest.raises(rc.ReactClipError, match=r"cannot be read: No such file.*export it again"):
        rc.load(f"onnx:{tmp_path / 'nothing'}")
    with pytest.raises(rc.ReactClipError, match="towers compute in fp32 or bf16"):
        rc.load(f"openvino:{copy}", dtype="fp16")
    weights = bytearray((copy / "encoder.bin").read_bytes())
    weights[len(weights) // 2] ^= 1
    (copy / "encoder.bin").write_bytes(weights)
    with pytest.raises(rc.ReactClipError, match=r"encoder\.bin is not the file that encoder\.json describes"):
        rc.load(f"openvino:{copy}")
    (copy / "encoder.bin").unlink()
    with pytest.raises(rc.ReactClipError, match=r"has no encoder\.bin; copy the whole folder"):
        rc.load(f"openvino:{copy}")
    (copy / "encoder.json").write_text("[]")
    with pytest.raises(rc.ReactClipError, match="is no record of an exported tower"):
        rc.load(f"openvino:{copy}")


def test_openvino_computes_in_bf16_only_when_asked(exported: dict[str, Path], tiny_folder: Path) -> None:
    name = f"openvino:{exported['openvino']}"
    tower, rough = rc.load(tiny_folder, device="cpu"), rc.load(name, dtype="bf16")
    assert rough.dtype == torch.bfloat16
    features = rough(pixels(3))
    assert features.dtype == torch.float32
    assert (features * tower(pixels(3))).sum(1).min() > 0.99
    assert rough.fingerprint() != rc.load(name).fingerprint()


def test_an_open_clip_tower_of_one_size_is_one_graph(open_clip_name: str, tmp_path: Path) -> None:
    encoder = rc.load(open_clip_name, device="cpu")
    encoder.patch_size = None
    parity = exporting.export(encoder, "onnx", tmp_path / "new", pixels(3))
    assert parity.max_difference < 1e-5
    assert parity.images == 6
    assert (rc.load(f"onnx:{tmp_path / 'new'}")(pixels(4)) - encoder(pixels(4))).abs().max() < 1e-5
