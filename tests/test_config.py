"""Configurations: strict fields, one-line errors, JSON and back, and classes of other packages."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

import react_clip as rc
from react_clip import attacks, defenses
from react_clip.config import Configuration, Count, PixelLength, PositiveLength, Range, Registered, Registry, Share
from toys import toy_classifier, toy_images


class Lens(Configuration):
    zoom: Range = (1.0, 2.0)
    share: Share = 0.5


class Camera(Registered):
    registry: ClassVar[Registry[Camera]] = Registry("camera", "tests.cameras")
    eps: PixelLength = 4 / 255


class Pinhole(Camera):
    kind = "pinhole"
    shots: Count = 3
    lens: Lens = field(default_factory=Lens)
    delay: float | None = None
    step: PositiveLength | Literal["eps/4"] = "eps/4"
    film: Literal["colour", "grey"] = "colour"

    def __post_init__(self) -> None:
        if self.shots > 36:
            raise rc.ReactClipError(f"shots is {self.shots}; a film has 36")


class Shelf(Configuration):
    first: Camera
    others: tuple[Camera, ...] = ()
    named: dict[str, Camera] = field(default_factory=dict)


def test_values_are_kept_compared_copied_and_printed() -> None:
    camera = Pinhole(2 / 255, 5, lens=Lens(share=1))
    assert camera == Pinhole(eps=2 / 255, shots=5, lens=Lens((1, 2), 1.0))
    assert hash(camera) == hash(pickle.loads(pickle.dumps(camera)))
    assert camera.replace(shots=6).shots == 6
    assert repr(camera) == (
        "Pinhole(eps=2/255, shots=5, lens=Lens(zoom=[1.0, 2.0], share=1.0), step=eps/4, film=colour)"
    )
    assert "delay=2.0" in repr(camera.replace(delay=2))
    with pytest.raises(FrozenInstanceError):
        camera.shots = 3  # type: ignore[misc]


def test_json_gives_the_same_configuration_back(tmp_path: Path) -> None:
    camera = Pinhole(shots=7, lens=Lens((1.5, 1.5)), step=0.123456789)
    shelf = Shelf(camera, (camera, Pinhole()), {"spare": camera})
    assert Shelf.from_dict(json.loads(json.dumps(shelf.to_dict()))) == shelf
    shelf.save(tmp_path / "shelf.json")
    assert Shelf.load(tmp_path / "shelf.json") == shelf
    assert camera.to_dict()["eps"] == "4/255"


@pytest.mark.parametrize("key", ["kind", "defense", "name"])
def test_earlier_names_of_the_key_kind_are_read(key: str) -> None:
    assert Camera.from_dict({key: "pinhole", "shots": 2}) == Pinhole(shots=2)
    assert Pinhole.from_dict({key: "pinhole", "shots": 2}) == Pinhole(shots=2)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"shots": True}, "shots is True; it must be a whole number (by default 3)"),
        ({"shots": 2.0}, "shots is 2.0; it must be a whole number (by default 3)"),
        ({"shots": "3"}, "shots is '3'; it must be a whole number (by default 3)"),
        ({"shots": 0}, "shots is 0; it must be a whole number >= 1 (by default 3)"),
        ({"shots": 37}, "shots is 37; a film has 36"),
        ({"eps": float("nan")}, "eps is nan; it must be a finite number (by default 4/255)"),
        ({"eps": 8}, "eps is 8; pixels lie in [0, 1], so write 8/255"),
        ({"eps": "8"}, "eps is 8.0; pixels lie in [0, 1], so write 8/255"),
        ({"eps": "4/0"}, "eps is '4/0'; it must be a number such as 4/255"),
        ({"eps": -0.1}, "eps is -0.1; it must be >= 0 (by default 4/255)"),
        ({"delay": True}, "delay is True; it must be a finite number"),
        ({"step": 0}, "step is 0; it must be > 0 or one of eps/4"),
        ({"film": "blue"}, "film is 'blue'; it must be one of colour, grey"),
        ({"lens": {"share": 2}}, "lens: share is 2; it must be <= 1 (by default 0.5)"),
        ({"lens": {"zoom": [2, 1]}}, "lens: zoom is (2, 1); it needs 0 < low <= high"),
        ({"lens": {"glass": 1}}, "lens: Lens has no field 'glass'; its fields are zoom, share"),
        ({"lens": 3}, "lens: 3 is not a mapping of Lens; its fields are zoom, share"),
        ({"flash": 1}, "pinhole has no field 'flash'; its fields are eps, shots, lens, delay, step, film"),
    ],
    ids=str,
)
@pytest.mark.parametrize("make", [Pinhole.from_dict, lambda values: Pinhole(**values)], ids=["file", "call"])
def test_a_wrong_value_is_named_in_one_line(make: Any, values: dict[str, Any], says: str) -> None:
    with pytest.raises(rc.ReactClipError) as caught:
        make(values)
    assert str(caught.value) == says


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("box", "camera 'box' does not exist; choose one of pinhole, or write module:Class for your own"),
        ({"eps": 0.1}, "the camera has no kind; choose one of pinhole, or write module:Class for your own"),
        (3, "the camera is 3; give its kind, or a mapping with one"),
        ("no.such:Thing", "camera 'no.such:Thing' cannot be imported: No module named 'no'"),
        ("json:loads", "json:loads is no camera; derive the class from the family's base class"),
    ],
)
def test_an_unknown_kind_lists_the_known_ones(value: Any, says: str) -> None:
    with pytest.raises(rc.ReactClipError) as caught:
        Shelf(value)
    assert str(caught.value) == f"first: {says}"


def test_missing_fields_and_wrong_kinds_are_named() -> None:
    with pytest.raises(rc.ReactClipError, match="Shelf needs 'first'; its fields are first, others, named"):
        Shelf()  # type: ignore[call-arg]
    with pytest.raises(rc.ReactClipError, match="this configuration is for 'aom', not 'react'"):
        rc.ReACT.from_dict({"kind": "aom"})
    with pytest.raises(rc.ReactClipError, match=r"camera kind 'pinhole' belongs to .*; give .*Copy another one"):
        type("Copy", (Camera,), {"kind": "pinhole"})


# ---------------------------------------------------------------------- classes of other packages

PACKAGE = """
from react_clip.attacks import PGD
from react_clip.config import Share
from react_clip.defenses import Defense, Undefended

class Fade(Defense):
    kind = "fade"
    label = "Fade to grey"
    colour = "#123456"
    share: Share = 0.5

    def cost(self):
        return 1, 0

    def __call__(self, clf, images, seed=0):
        return Undefended()(clf, images * (1 - self.share) + self.share / 2, seed)

class Gentle(PGD):
    kind = "gentle"
    steps: int = 1

class Hidden(Fade):
    kind = "hidden"
"""


@pytest.fixture
def other_package(no_new_classes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package with entry points; it is forgotten afterwards."""
    (tmp_path / "fading.py").write_text(PACKAGE)
    info = tmp_path / "fading-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fading\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[react_clip.defenses]\nfade = fading:Fade\nwrong = fading:Fade\n[react_clip.attacks]\ngentle = fading:Gentle\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("fading", None)


@pytest.mark.usefixtures("other_package")
def test_classes_of_other_packages_are_found_by_entry_points() -> None:
    assert "fade" in defenses.names()
    guard = defenses.from_dict({"kind": "fade", "share": 1.0})
    assert (type(guard).label, type(guard).colour, guard.name) == ("Fade to grey", "#123456", "fade")
    assert guard.to_dict() == {"kind": "fade", "share": 1.0}
    assert defenses.from_dict(guard.to_dict()) == guard
    out = guard(toy_classifier(), toy_images(3))
    assert (out.labels == out.labels[0]).all(), "all images are the same grey"
    assert "gentle" in attacks.names()
    assert attacks.from_dict({"kind": "gentle", "eps": "1/255"}).to_dict()["kind"] == "gentle"
    with pytest.raises(rc.ReactClipError, match="fading:Fade has no kind of its own that fits; write kind = 'wrong'"):
        defenses.from_dict("wrong")


@pytest.mark.usefixtures("other_package")
def test_a_class_without_an_entry_point_is_written_as_module_and_class() -> None:
    guard = defenses.from_dict({"kind": "fading:Hidden", "share": 0.25})
    assert guard.to_dict() == {"kind": "fading:Hidden", "share": 0.25}
    assert defenses.from_dict(json.loads(json.dumps(guard.to_dict()))) == guard
