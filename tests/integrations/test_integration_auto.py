"""``guard="auto"``: SecondLook is calibrated on the photos that come with it, for models without a threshold."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import react_clip as rc
import tiny_families
from react_clip.preprocess import to_image
from react_clip.zeroshot import with_everyday_names

from .conftest import check_refusals

pytestmark = pytest.mark.filterwarnings("ignore:.*photos:UserWarning")  # 24 are few


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> rc.Encoder:
    """A small SigLIP: the tiny CLIP has too few patches for a smaller copy."""
    return rc.load(tiny_families.write_hf(tmp_path_factory.mktemp("siglip"), "siglip"), device="cpu")


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Photos of one colour each; random weights take more structure for an attack."""
    folder = tmp_path_factory.mktemp("clean")
    colours = np.random.default_rng(0).integers(0, 255, (24, 3))
    for number, colour in enumerate(colours.tolist()):
        Image.new("RGB", (90, 70), tuple(colour)).save(folder / f"{number:02}.png")
    return sorted(folder.iterdir())


def test_search_pipeline_and_collections_calibrate(encoder: rc.Encoder, clean: list[Path], tmp_path: Path) -> None:
    expected = rc.SecondLook.calibrate(encoder, clean).config
    assert expected.threshold is None
    assert expected.drift_threshold != rc.SecondLook().drift_threshold
    function = rc.integrations.ChromaEmbeddings(encoder, "auto", photos=clean, seed=0)
    assert function.guard == expected
    assert function.get_config()["guard"] == expected.to_dict(), "the threshold is stored, the photos are not needed"
    clf = rc.ZeroShotClassifier(encoder, ["cat", "dog"])
    with_classes = rc.SecondLook.calibrate(clf, clean).config
    assert with_classes.threshold != rc.SecondLook().threshold
    rc.scale.defend_dataset(clean[0], tmp_path / "out", clf, "auto", photos=clean, engine="local")
    assert json.loads((tmp_path / "out.json").read_text())["guard"] == with_classes.to_dict()
    pipe: Any = rc.integrations.zero_shot_pipeline(encoder, "auto", photos=clean, seed=0)
    seen = [to_image(pipe.preprocess(path)["pixel_values"][0]) for path in clean]
    assert pipe.guard == rc.SecondLook.calibrate(with_everyday_names(encoder), seen).config


def test_errors_name_the_way_out(encoder: rc.Encoder, clean: list[Path]) -> None:
    make = partial(rc.integrations.LangChainEmbeddings, encoder)
    check_refusals(
        (make, r"no calibration for .*guard='auto', photos=\[\.\.\.\]"),
        (partial(make, "auto"), r"there are none; give photos=\[\.\.\.\]"),
        (partial(make, "second_look"), r"guard is 'second_look'; give a defence, such as rc.ReACT\(\), or 'auto'"),
        (partial(make, rc.ReACT(), photos=clean), "only guard='auto' is calibrated on them"),
    )
