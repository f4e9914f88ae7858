"""The classifier: prompts, ensembles, ready features, folders, and a cache that is written once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

import react_clip as rc
from react_clip import zeroshot
from react_clip.encoders.text import TextTower
from react_clip.preprocess import as_pixels
from toys import ToyEncoder, toy_images, write_photos


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for name in ("cat", "dog"):
        write_photos(tmp_path / "photos" / name)
    return tmp_path / "photos"


def test_long_lists_of_prompts_are_encoded_once(
    tiny_folder: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, encoded = rc.load(tiny_folder, device="cpu"), list[str]()
    encode = TextTower.encode
    monkeypatch.setattr(TextTower, "encode", lambda self, prompts: encoded.extend(prompts) or encode(self, prompts))
    few = rc.ZeroShotClassifier(encoder, ["cat", "dog"], templates=["a photo of a {}."])
    assert encoded == ["a photo of a cat.", "a photo of a dog."]
    assert not list(own_cache.rglob("*.safetensors")), "two prompts take no longer than the cache"
    monkeypatch.setattr(zeroshot, "_FEW_PROMPTS", 1)
    first = rc.ZeroShotClassifier(encoder, ["cat", "dog"], templates=["a photo of a {}."])
    again = rc.ZeroShotClassifier(encoder, ["cat", "dog"], templates=["a photo of a {}."])
    assert len(encoded) == 4
    assert torch.equal(first.class_features, again.class_features)
    assert torch.equal(first.class_features, few.class_features)
    for names, templates in ((["cat", "cow"], ["a photo of a {}."]), (["cat", "dog"], ["a {}."])):
        rc.ZeroShotClassifier(encoder, names, templates=templates)
    rc.ZeroShotClassifier(rc.load(tiny_folder, device="cpu", dtype="bf16"), ["a", "b"], templates=["a photo of a {}."])
    next(encoder.text.parameters()).data[0, 0] += 1.0
    rc.ZeroShotClassifier(encoder, ["cat", "dog"], templates=["a photo of a {}."])
    assert len(encoded) == 12, "other names, templates, precisions and weights are other features"


def test_an_ensemble_is_the_normalised_mean_of_its_prompts(tiny_folder: Path) -> None:
    encoder = rc.load(tiny_folder, device="cpu")
    clf = rc.ZeroShotClassifier(encoder, ["cat"], templates=["a {}.", "the {} of {x}!"])
    mean = encoder.encode_text(["a cat.", "the cat of {x}!"]).mean(0)
    assert torch.allclose(clf.class_features[0], mean / mean.norm(), atol=1e-6)
    empty = encoder.encode_text(["a .", "the  of {x}!"]).mean(0)
    with torch.inference_mode():
        assert torch.allclose(clf.empty_prompt(), empty / empty.norm(), atol=1e-6)
    assert not clf.empty_prompt().is_inference()


def test_logits_are_a_hundred_cosines() -> None:
    encoder, features = ToyEncoder(), torch.randn(4, 12) * 3
    clf, images = rc.ZeroShotClassifier.from_features(encoder, list("abcd"), features), toy_images(2)
    expected = 100 * torch.nn.functional.cosine_similarity(encoder(images)[:, None], features[None], dim=-1)
    assert torch.allclose(clf(images), expected, atol=1e-4)
    mean = clf.class_features.mean(0)
    assert torch.allclose(clf.empty_prompt(), mean / mean.norm(), atol=1e-6), "without a text tower"


def test_a_folder_gives_mean_features_and_is_cached_by_content(photos: Path, own_cache: Path) -> None:
    encoder = ToyEncoder()
    clf = rc.ZeroShotClassifier.from_folder(encoder, photos)
    assert clf.names == ("cat", "dog")
    mean = encoder(as_pixels(sorted((photos / "cat").iterdir()), encoder.preprocessing)).mean(0)
    assert torch.allclose(clf.class_features[0], mean / mean.norm(), atol=1e-6)
    before = encoder.encoded
    rc.ZeroShotClassifier.from_folder(encoder, photos)
    assert encoder.encoded == before
    Image.new("RGB", (20, 20), "red").save(photos / "cat" / "photo0.png")
    changed = rc.ZeroShotClassifier.from_folder(encoder, photos)
    assert encoder.encoded > before
    assert not torch.allclose(changed.class_features[0], clf.class_features[0])


def test_a_damaged_cache_file_is_computed_again(photos: Path, own_cache: Path) -> None:
    encoder = ToyEncoder()
    whole = rc.ZeroShotClassifier.from_folder(encoder, photos).class_features
    [path] = own_cache.rglob("*.safetensors")
    intact = path.read_bytes()
    for damage in (b"", intact[: len(intact) // 2], b"garbage" * 100):
        path.write_bytes(damage)
        assert torch.equal(rc.ZeroShotClassifier.from_folder(encoder, photos).class_features, whole)
        assert path.read_bytes() == intact
    assert [p for p in own_cache.rglob("*") if p.is_file()] == [path], "no half-written file is left behind"


def test_a_cache_that_cannot_be_written_is_ignored(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("a file where the cache should be")
    monkeypatch.setenv("REACT_CLIP_CACHE", str(tmp_path / "file"))
    assert rc.ZeroShotClassifier.from_folder(ToyEncoder(), photos).names == ("cat", "dog")
    with pytest.raises(rc.ReactClipError, match=r"cannot write .*set REACT_CLIP_CACHE"):
        rc.pull("clip-vit-b-16")


def test_impossible_classes_are_refused(tiny_folder: Path, photos: Path, tmp_path: Path) -> None:
    encoder = ToyEncoder()
    for names, says in (
        ([], "the list of labels is empty"),
        (["cat", "dog", "cat"], "label 'cat' is given 2 times"),
        (["cat", "  "], "label 2 of 2 is blank"),
        ("cat", "the labels are one string"),
    ):
        with pytest.raises(rc.ReactClipError, match=says):
            rc.ZeroShotClassifier.from_features(encoder, names, torch.randn(max(1, len(names)), 12))
    with pytest.raises(rc.ReactClipError, match=r"shape \[2, 7\], not \[2, 12\]"):
        rc.ZeroShotClassifier.from_features(encoder, ["a", "b"], torch.randn(2, 7))
    for row in (torch.zeros(12), torch.full((12,), torch.nan)):
        with pytest.raises(rc.ReactClipError, match="NaN, infinity or an all-zero row"):
            rc.ZeroShotClassifier.from_features(encoder, ["a", "b"], torch.stack([row, torch.ones(12)]))
    with pytest.raises(rc.ReactClipError, match=r"needs exactly one \{\}"):
        rc.ZeroShotClassifier(rc.load(tiny_folder, device="cpu"), ["cat"], templates=["a photo"])
    (photos / "bird").mkdir()
    for folder, says in (
        (tmp_path / "missing", "missing does not exist"),
        (photos, "bird holds no photos"),
        (photos / "bird", "has no sub-folders"),
    ):
        with pytest.raises(rc.ReactClipError, match=says):
            rc.ZeroShotClassifier.from_folder(encoder, folder)


def test_without_a_text_tower_names_need_the_label_table() -> None:
    with pytest.raises(rc.ReactClipError, match="no text tower and the label table belongs to 'clip-vit-b-16'"):
        rc.ZeroShotClassifier(ToyEncoder(), ["cat"])
    with pytest.raises(rc.ReactClipError, match="has no text tower; use ready class features"):
        ToyEncoder().encode_text(["cat"])
    encoder = ToyEncoder()
    encoder.dim, encoder.weights = 512, "clip-vit-b-16+finetuned.safetensors"
    clf = rc.ZeroShotClassifier(encoder, ["cat", "teapot"])
    assert torch.equal(clf.class_features, rc.LabelTable.load().features(["cat", "teapot"]))
    with pytest.warns(UserWarning, match="the templates are ignored"):
        rc.ZeroShotClassifier(encoder, ["cat"], templates=["a {}."])
