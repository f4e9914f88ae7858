"""Configurations: strict fields, one-line errors, JSON and back, and classes of other packages."""

from __future__ import annotations

import json
import pickle
from dataclasses import FrozenInstanceError, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

import react_clip as rc
from react_clip import attacks, defenses
from react_clip.config import Configuration, Count, Fraction, PixelLength, PositiveLength, Range, Registered, Registry
from toys import install, toy_classifier, toy_images


class Lens(Configuration):
    zoom: Range = (1.0, 2.0)
    share: Fraction = 0.5


class Camera(Registered):
    registry: ClassVar[Registry[Camera]] = Registry("camera", "tests.cameras")
    eps: PixelLength = 4 / 255


class Pinhole(Camera):
    kind = "pinhole"
    removed = {"flash": False, "brand": ...}  # noqa: RUF012
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
    (tmp_path / "damaged.json").write_text("{")
    with pytest.raises(rc.ReactClipError, match="is no valid JSON"):
        Shelf.load(tmp_path / "damaged.json")


def test_files_of_earlier_versions_are_read_if_they_mean_the_same() -> None:
    assert Camera.from_dict({"kind": "pinhole", "flash": False, "brand": "any"}) == Pinhole()
    with pytest.raises(rc.ReactClipError, match=r"pinhole no longer has 'flash' \(now always False\); remove it"):
        Pinhole.from_dict({"flash": True})


FIELDS = "; the fields of pinhole are eps, shots, lens, delay, step, film"
LENS = "; the fields of Lens are zoom, share"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"zoom": 1}, f"zoom is 1: Unexpected keyword argument{FIELDS}"),
        ({"shots": True}, f"shots is True: Input should be a valid integer{FIELDS}"),
        ({"shots": 0}, f"shots is 0: Input should be greater than or equal to 1{FIELDS}"),
        ({"shots": 37}, "shots is 37; a film has 36"),
        ({"eps": float("nan")}, f"eps is nan: Input should be a finite number{FIELDS}"),
        ({"eps": 8}, f"eps is 8: pixels lie in [0, 1], so write 8/255{FIELDS}"),
        ({"eps": "4/0"}, f"eps is '4/0': it must be a number such as 4/255{FIELDS}"),
        ({"step": 0}, f"step is 0: Input should be greater than 0 or Input should be 'eps/4'{FIELDS}"),
        ({"film": "blue"}, f"film is 'blue': Input should be 'colour' or 'grey'{FIELDS}"),
        ({"lens": {"zoom": [2, 1]}}, f"lens: zoom is (2, 1): it needs 0 < low <= high{LENS}"),
        ({"lens": 3}, f"lens: 3 is not a mapping of Lens{LENS}"),
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
        ("json:loads", "json:loads is no camera: it needs the family's base class and a kind of its own"),
    ],
)
def test_an_unknown_kind_lists_the_known_ones(value: Any, says: str) -> None:
    with pytest.raises(rc.ReactClipError) as caught:
        Shelf(value)
    assert str(caught.value) == f"first: {says}"


def test_missing_fields_and_wrong_kinds_are_named() -> None:
    with pytest.raises(rc.ReactClipError, match="Shelf needs 'first'; the fields of Shelf are first, others, named"):
        Shelf()  # type: ignore[call-arg]
    with pytest.raises(rc.ReactClipError, match="this configuration is for 'aom', not 'react'"):
        rc.ReACT.from_dict({"kind": "aom"})
    with pytest.raises(rc.ReactClipError, match=r"camera kind 'pinhole' belongs to .*; choose another one"):
        type("Copy", (Camera,), {"kind": "pinhole"})


# ---------------------------------------------------------------------- classes of other packages

DEFENCE = """
from react_clip.config import Fraction
from react_clip.defenses import Defense

class Fade(Defense):
    kind = "fade"
    fraction: Fraction = 0.5

    def defend(self, x):
        return x.encode(x.changed(lambda images: images * (1 - self.fraction) + self.fraction / 2)), {}
"""


ATTACK = """
from react_clip.attacks import PGD

class Gentle(PGD):
    kind = "gentle"
    steps: int = 1
"""


@pytest.mark.usefixtures("no_new_classes")
def test_a_defence_and_an_attack_of_other_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "fading", DEFENCE, "[react_clip.defenses]\nfade = fading:Fade\nwrong = fading:Fade\n")
    install(tmp_path, "gentle_attacks", ATTACK, "[react_clip.attacks]\ngentle = gentle_attacks:Gentle\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert attacks.from_dict("gentle") == attacks.from_dict("gentle_attacks:Gentle")
    assert "fade" in defenses.names()
    guard = defenses.from_dict({"kind": "fade", "fraction": 1.0})
    assert guard.to_dict() == {"kind": "fade", "fraction": 1.0}
    assert defenses.from_dict(json.loads(json.dumps(guard.to_dict()))) == guard
    out = guard(toy_classifier(), toy_images(3))
    assert (out.labels == out.labels[0]).all(), "all images are the same grey"
    assert defenses.from_dict("fading:Fade") == type(guard)()
    with pytest.raises(
        rc.ReactClipError, match="wrong is no defence: it needs the family's base class and a kind of its own"
    ):
        defenses.from_dict("wrong")
