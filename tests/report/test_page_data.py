"""Which rows and photos a page carries, and that what it carries is what the run says."""

from __future__ import annotations

import base64
import io
import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
from PIL import Image

from react_clip.evaluation.store import Pictures
from react_clip.report.page_data import (
    BROKEN,
    FOOLED,
    OUTCOMES,
    RIGHT,
    SAVED,
    SIDE,
    WRONG,
    Rows,
    embedded_photos,
    outcomes,
)
from react_clip.report.run import Run, read_run

TABLE1 = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "table1"


def rows_of(folder: Path, limit: int = 100_000) -> tuple[Run, Rows]:
    run = read_run(folder)
    assert run.images is not None
    return run, Rows(run, run.images, limit)


def test_each_combination_of_answers_has_one_outcome() -> None:
    def outcome(clean: int, plain: int, answer: int) -> int:
        columns = {"label": 0, "clean_prediction": clean, "plain_prediction": plain, "prediction": answer}
        return int(outcomes(pd.DataFrame([columns]))[0])

    assert outcome(0, 1, 0) == outcome(1, 1, 0) == SAVED
    assert outcome(0, 0, 1) == outcome(1, 0, 1) == BROKEN
    assert outcome(0, 1, 2) == FOOLED
    assert outcome(0, 0, 0) == outcome(1, 0, 0) == RIGHT
    assert outcome(1, 1, 1) == WRONG
    assert len(OUTCOMES) == 5


def test_every_number_of_the_run_is_in_the_page(toy_folder: Path) -> None:
    run, rows = rows_of(toy_folder)
    assert run.images is not None
    assert run.result is not None
    data = json.loads(rows.to_json({}))
    lists = {
        **{
            "dataset": ("set", data["sets"]),
            "label": ("label", data["names"]),
            "prediction": ("answer", data["names"]),
        },
        "attack": ("attack", [item["title"].partition(" ")[0] for item in data["attacks"]]),
        "defense": ("defense", [item["label"] for item in data["defenses"]]),
    }
    found = {name: [texts[i] for i in data["columns"][column]] for name, (column, texts) in lists.items()}
    found |= {name: data["columns"][name] for name in ("index", "draw", "passes")}
    found["r"] = [math.nan if value is None else value / 1000 for value in data["columns"]["r"]]
    expected = run.images[list(found)].copy()
    for name in ("label", "prediction"):
        expected[name] = [run.result.sets[0].class_names[number] for number in expected[name]]
    key = ["dataset", "index", "attack", "defense", "draw"]
    frames = [frame.sort_values(key, ignore_index=True) for frame in (pd.DataFrame(found), expected)]
    pd.testing.assert_frame_equal(*frames, check_dtype=False, atol=1e-3)
    assert {item["label"]: item["tau"] for item in data["defenses"]} == {"undefended": None, "react": 0.3}


def test_a_limit_keeps_whole_images_evenly_over_the_sets() -> None:
    _, rows = rows_of(TABLE1, 18_000)
    assert (len(rows), rows.total, len(rows.images), rows.images_total) == (18_000, 45_000, 400, 1_000)
    assert set(rows.rows.groupby(["set", "index"]).size()) == {45}, "five attacks by nine defences"
    for number in range(10):
        indices = sorted(index for where, index in rows.images if where == number)
        assert len(indices) == 40
        assert np.diff(indices, prepend=-1, append=100).max() <= 4, "40 of 100, spread over the whole set"
    assert len(rows.to_json({})) < 1_500_000
    _, one = rows_of(TABLE1, 1)
    assert len(one.images) == 1, "whole images, at least one"
    _, unnamed = rows_of(TABLE1.with_name("step-quarter"), 1)
    for shown, named in ((one, True), (unnamed, False)):
        names = json.loads(shown.to_json({}))["names"]
        assert all(name.startswith("class ") != named for name in names), "classes of older runs have no names"


def test_instructive_images_come_first_and_from_every_set() -> None:
    _, rows = rows_of(TABLE1, 20_000)
    ranked = rows.instructive()
    assert sorted(ranked) == sorted(rows.images)
    assert {number for number, _ in ranked[:10]} == set(range(10))
    interesting = {SAVED, BROKEN, FOOLED}
    defended = rows.rows["defense"] != rows.defenses.index("CLIP")
    for number, index in ranked[:40]:
        here = (rows.rows["set"] == number) & (rows.rows["index"] == index) & defended
        assert interesting & set(rows.rows["outcome"][here].tolist())


def test_pictures_are_small_and_the_perturbation_is_what_was_added(toy_folder: Path) -> None:
    run, rows = rows_of(toy_folder)
    photos, album = embedded_photos(run.folders, rows, 3), Pictures(toy_folder)
    assert len(photos) == 3
    assert any(shown["attacked"] for shown in photos.values())
    for key, shown in photos.items():
        index = int(key.partition(":")[2])
        before = album.clean("data", index)
        assert max(picture(shown["clean"]).shape[:2]) <= SIDE
        for attack, (attacked, perturbation, factor) in shown["attacked"].items():
            name, eps = rows.attacks[int(attack)]
            after = album.attacked("data", name, eps, index)
            assert after is not None
            assert factor == round(0.5 / eps, 1)
            expected = ((after - before) * factor + 0.5).mean(0).flatten()
            drawn = picture(perturbation)
            # Compressed pictures are not exact; that they agree pixel by pixel is.
            assert np.corrcoef(expected, drawn.mean(-1).ravel())[0, 1] > 0.8
            assert picture(attacked).shape == drawn.shape
    assert embedded_photos(run.folders, rows, 0) == {}


def picture(uri: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))), dtype=float)
