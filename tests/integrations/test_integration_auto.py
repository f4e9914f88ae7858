"""``guard="auto"``: SecondLook is calibrated on the photos that come with it, for models without a threshold."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import react_clip as rc
import tiny_families
from react_clip.preprocess import to_image

pytestmark = pytest.mark.filterwarnings("ignore:.*photos:UserWarning")  # 24 are few


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> rc.Encoder:
    """A small SigLIP: the tiny CLIP has too few patches for a look."""
    return rc.load(tiny_families.write_hf(tmp_path_factory.mktemp("siglip"), "siglip"), device="cpu")


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Photos of one colour each; random weights take more structure for an attack."""
    folder = tmp_path_factory.mktemp("clean")
    colours = np.random.default_rng(0).integers(0, 255, (24, 3))
    for number, colour in enumerate(colours.tolist()):
        Image.new("RGB", (90, 70), tuple(colour)).save(folder / f"{number:02}.png")
    return sorted(folder.iterdir())


@pytest.fixture(scope="module")
def expected(encoder: rc.Encoder, clean: list[Path]) -> rc.SecondLook:
    return rc.SecondLook.calibrate(encoder, clean).config


def test_search_and_the_pipeline_calibrate(encoder: rc.Encoder, clean: list[Path], expected: rc.SecondLook) -> None:
    assert expected.threshold != rc.SecondLook().threshold
    function = rc.integrations.ChromaEmbeddings(encoder, "auto", photos=clean, seed=0)
    assert function.guard == expected
    assert function.get_config()["guard"] == expected.to_dict(), "the threshold is stored, the photos are not needed"
    pipe: Any = rc.integrations.zero_shot_pipeline(encoder, "auto", photos=clean, seed=0)
    seen = [to_image(pipe.preprocess(path)["pixel_values"][0]) for path in clean]
    assert pipe.guard == rc.SecondLook.calibrate(encoder, seen).config
    assert {row["label"] for row in pipe(clean[0], candidate_labels=["cat", "dog"])} == {"cat", "dog"}


def test_open_clip_calibrates(clean: list[Path], tmp_path: Path) -> None:
    import open_clip

    name, weights = tiny_families.write_open_clip(tmp_path, "vit").removeprefix("open_clip:").split("/", 1)
    model = open_clip.create_model(name, pretrained=weights)
    defended = rc.integrations.DefendedOpenCLIP(model, "auto", photos=clean, seed=0)
    assert defended.guard == rc.SecondLook.calibrate(defended.encoder, clean).config


def test_a_collection_calibrates(
    encoder: rc.Encoder, clean: list[Path], expected: rc.SecondLook, tmp_path: Path
) -> None:
    clf = rc.ZeroShotClassifier(encoder, ["cat", "dog"])
    rc.scale.defend_dataset(clean[0], tmp_path, clf, "auto", photos=clean, engine="local")
    assert json.loads((tmp_path / "plan.json").read_text())["guard"] == expected.to_dict()


def test_errors_name_the_way_out(encoder: rc.Encoder, clean: list[Path]) -> None:
    def build(**given: Any) -> Callable[[], object]:
        return lambda: rc.integrations.LangChainEmbeddings(encoder, **given)

    for make, says in (
        (build(), r"no calibration for .*guard='auto', photos=\[\.\.\.\]"),
        (build(guard="auto"), r"there are none; give photos=\[\.\.\.\]"),
        (build(guard="second_look"), r"guard is 'second_look'; give a defence, such as rc.ReACT\(\), or 'auto'"),
        (build(photos=clean), "only guard='auto' is calibrated on them"),
        (build(guard=rc.ReACT(), photos=clean), "only guard='auto' is calibrated on them"),
        (build(guard="auto", photos=clean[:3]), "3 photos are too few"),
    ):
        with pytest.raises(rc.ReactClipError, match=says):
            make()
