"""Class features from disk, and photos aligned to them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from react_clip import data
from react_clip.data import Head
from react_clip.errors import ReactClipError


def make_head(*names: str, folders: tuple[str, ...] = ()) -> Head:
    return Head(names, folders or names, torch.eye(len(names), 16))


def test_npz_and_safetensors_say_the_same(tmp_path: Path) -> None:
    features = torch.randn(2, 4, dtype=torch.float64)
    np.savez(tmp_path / "a.npz", names=["a cat", "a dog"], folders=["cat", "dog"], features=features.numpy())
    metadata = {"names": json.dumps(["a cat", "a dog"]), "folders": json.dumps(["cat", "dog"])}
    save_file({"features": features.half()}, tmp_path / "b.safetensors", metadata=metadata)
    first, second = data.load_head(tmp_path / "a.npz"), data.load_head(str(tmp_path / "b.safetensors"))
    assert first.names == second.names == ("a cat", "a dog")
    assert first.folders == second.folders == ("cat", "dog")
    assert first.features.dtype == second.features.dtype == torch.float32
    assert torch.allclose(first.features, second.features, atol=1e-2)
    np.savez(tmp_path / "a.npz", names=["cat", "dog"], features=np.eye(2))
    save_file({"features": torch.eye(2)}, tmp_path / "b.safetensors", metadata={"names": '["cat", "dog"]'})
    for name in ("a.npz", "b.safetensors"):
        assert data.load_head(tmp_path / name).folders == ("cat", "dog"), "folders default to the names"


@pytest.mark.parametrize(
    ("arrays", "complaint"),
    [
        ({"features": np.eye(2)}, "names"),
        ({"names": ["cat"]}, "features"),
        ({"names": ["cat"], "features": np.eye(2)}, r"shape \(2, 2\) for 1 names"),
        ({"names": ["cat", "dog"], "features": np.ones(2)}, r"shape \(2,\)"),
        ({"names": ["cat", "dog"], "features": np.array([[1.0, np.nan], [0, 1]])}, "NaN"),
        ({"names": ["cat", "dog"], "features": np.array([[1.0, 0], [0, 0]])}, "all-zero row"),
        ({"names": np.array(["cat", None], dtype=object), "features": np.eye(2)}, "allow_pickle"),
    ],
)
def test_a_bad_npz_is_explained(arrays: dict[str, object], complaint: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **arrays)  # type: ignore[arg-type]
    with pytest.raises(ReactClipError, match=rf"a\.npz is not a head \(.*{complaint}"):
        data.load_head(tmp_path / "a.npz")


def test_other_bad_files_are_explained(tmp_path: Path) -> None:
    with pytest.raises(ReactClipError, match=r"no head at .*none\.npz"):
        data.load_head(tmp_path / "none.npz")
    (tmp_path / "head.pt").write_bytes(b"")
    with pytest.raises(ReactClipError, match=r"ends in '\.pt'; a head is a \.npz"):
        data.load_head(tmp_path / "head.pt")
    for name in ("a.npz", "b.safetensors"):
        for content in (b"", b"PK\x03\x04 broken", b"junk" * 50):
            (tmp_path / name).write_bytes(content)
            with pytest.raises(ReactClipError, match="is not a head") as error:
                data.load_head(tmp_path / name)
            assert "\n" not in str(error.value)
    save_file({"features": torch.eye(2)}, tmp_path / "b.safetensors")
    with pytest.raises(ReactClipError, match=r"is not a head \('names'\)"):
        data.load_head(tmp_path / "b.safetensors")


def test_a_head_keeps_the_names_that_its_features_were_made_from(tmp_path: Path) -> None:
    old = {"n02012849": "crane", "n03126707": "crane", "n02113186": "Cardigan", "n02963159": "cardigan"}
    for folder in old:
        (tmp_path / "imagenet" / "test" / folder).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "imagenet" / "test" / folder / "a.png")
    dataset = data.load("imagenet", root=tmp_path)
    used = [dataset.class_names[label] for label in dataset.labels]
    assert used == ["crane bird", "Cardigan Welsh corgi", "cardigan", "crane machine"]
    aligned, head = dataset.align(make_head(*old.values(), folders=tuple(old)))
    assert aligned.class_names == head.names == tuple(old.values())
    found = [head.folders[label] for label in aligned.labels]
    assert found == [photo.id.split("/")[0] for photo in dataset.photos], "found by folder, whatever the names"
    # Without folders only the one class whose name is still the same can be found; the others are not guessed.
    with pytest.raises(ReactClipError, match="knows 1 of the 4 classes"):
        dataset.align(make_head("crane", "a crane", "Lhasa", "Cardigan"))


def test_align_takes_the_heads_order_and_drops_what_it_lacks(pets: Path) -> None:
    dataset = data.load("oxford_pets", root=pets)
    head = make_head("goldfish", "pug", "an Abyssinian", folders=("goldfish", "pug", "Abyssinian"))
    aligned, same = dataset.align(head)
    assert same is head
    assert aligned.class_names == head.names
    assert aligned.folders == head.folders
    assert aligned.labels == [2] * 4 + [1] * 6
    assert aligned.notes[-2:] == (
        "dropped 2 photos of 1 classes the head lacks: american_bulldog",
        "1 of the head's 3 classes have no photo here",
    )
    assert [photo.id for photo in aligned.photos[:4]] == [photo.id for photo in dataset.photos[:4]]
    assert aligned.fingerprint() != dataset.fingerprint()
    assert len(dataset) == 12, "the original is untouched"


def test_align_falls_back_to_names(pets: Path) -> None:
    dataset = data.load("oxford_pets", root=pets)
    aligned, _ = dataset.align(make_head("Pug", "American Bulldog", "Abyssinian", folders=("c0", "c1", "c2")))
    assert aligned.labels == [2] * 4 + [1] * 2 + [0] * 6
    assert aligned.notes == dataset.notes


def test_a_name_that_two_classes_bear_matches_neither(pets: Path) -> None:
    dataset = data.load("oxford_pets", root=pets)
    head = make_head("pug", "pug", "Abyssinian", "american bulldog", folders=("c0", "c1", "c2", "c3"))
    aligned, _ = dataset.align(head)
    assert set(aligned.labels) == {2, 3}


def test_a_head_of_another_set_is_refused(pets: Path) -> None:
    dataset = data.load("oxford_pets", root=pets)
    with pytest.raises(ReactClipError, match=r"knows 1 of the 3 classes of oxford_pets \(not .*\), fewer than half"):
        dataset.align(make_head("pug", "goldfish"))
    with pytest.raises(ReactClipError, match="knows 0 of the 3 classes"):
        dataset.align(make_head("airplane"))
