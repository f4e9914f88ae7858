"""A shadow changes no answer, runs for its share while nobody waits, and tells what it would have changed."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from serve_client import KEYS, LABELS, SECOND_LOOK, as_json, metric

import react_clip as rc
from programs import wait_for
from react_clip.cli.serve import load_model
from react_clip.defenses.view import View
from react_clip.errors import ReactClipError
from react_clip.intervals import wilson
from react_clip.preprocess import to_8bit
from react_clip.serve.metrics import Metrics
from react_clip.serve.settings import Settings
from react_clip.serve.shadow import Shadow
from react_clip.storage import tensor_digest


@pytest.fixture(scope="module")
def shaded(start: Any) -> Any:
    """Plain CLIP with a shadow, for callers with keys."""
    client = start(rc.Undefended(), KEYS, shadow=SHADOW)
    client.headers["authorization"] = f"Bearer {KEYS[0]}"
    return client


SHADOW = SECOND_LOOK.replace(threshold=0.0)
"""So that many answers change."""


def table_of(client: Any, compared: int) -> Any:
    """The table as soon as the shadow has run for so many images."""
    wait_for(lambda: client.get("/v1/shadow").json()["compared"] >= compared)
    return client.get("/v1/shadow").json()


def test_callers_get_plain_answers_and_the_table_has_what_would_change(
    shaded: Any, direct: Any, encoder: rc.Encoder, photos: list[bytes]
) -> None:
    plain, defended = (direct(photos, guard=guard).names for guard in (rc.Undefended(), SHADOW))
    expected = [
        {"photo": tensor_digest(to_8bit(photo, encoder.preprocessing))[:16], "answer": was, "shadow": would}
        for photo, was, would in zip(photos, plain, defended, strict=True)
        if was != would
    ]
    assert 1 <= len(expected) < len(photos)
    answer = shaded.post("/v1/classify", **as_json(photos)).json()
    assert [result["label"] for result in answer["results"]] == plain
    assert shaded.get("/v1/info").json()["defence"]["name"] == "undefended"
    table = table_of(shaded, len(photos))
    assert [{**row, "time": None} for row in table["rows"]] == [{"time": None, **row} for row in expected]
    assert table["rows"][0]["time"].endswith("Z")
    assert (table["compared"], table["skipped"], table["changed"]) == (len(photos), 0, len(expected))
    assert list(table["changed_share"].values()) == pytest.approx(wilson(len(expected) / len(photos), len(photos)))
    assert sum(pair["images"] for pair in table["labels"]) == len(expected)
    assert table["shadow"] == SHADOW.to_dict()
    assert 1 < table["passes"] <= 3
    for outcome, count in (("changed", len(expected)), ("same", len(photos) - len(expected))):
        line = f'react_clip_shadow_images_total{{outcome="{outcome}"}} {count}.0'
        assert line in shaded.get("/metrics").text
    assert metric(shaded, "react_clip_images_total") == len(photos)


def test_the_table_as_csv_has_no_formulas(shaded: Any, photos: list[bytes]) -> None:
    before = shaded.get("/v1/shadow").json()
    shaded.post("/v1/classify", **as_json(photos, labels=["=1+1", "@x", "-y", "+z"]))
    table_of(shaded, before["compared"] + len(photos))
    answer = shaded.get("/v1/shadow?format=csv")
    assert answer.headers["content-type"].startswith("text/csv")
    head, *rows = csv.reader(io.StringIO(answer.text))
    assert head == ["time", "photo", "answer", "shadow"]
    own = rows[len(before["rows"]) :]
    assert own
    assert all(cell.startswith("'") for row in own for cell in row[2:])
    assert shaded.get("/v1/shadow?format=xml").status_code == 422


def test_only_those_who_may_see_metrics_see_the_table(start: Any, shaded: Any, client: Any) -> None:
    assert shaded.get("/v1/shadow", headers={"authorization": "Bearer nothing"}).status_code == 401
    assert start(rc.Undefended(), shadow=SHADOW).get("/v1/shadow").status_code == 403
    assert client.get("/v1/shadow").status_code == 404


def test_a_share_of_the_photos_and_a_bounded_number_wait(encoder: rc.Encoder) -> None:
    classes, image = rc.ZeroShotClassifier(encoder, LABELS), torch.zeros(3, 32, 32, dtype=torch.uint8)
    some, every = (Shadow(SHADOW, share, Metrics(shared=False)) for share in (0.25, 1.0))
    keys = torch.randint(-(2**63), 2**63 - 1, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    for shadow in (some, every):
        for key in keys:
            shadow.add((image, key, classes, 0))
    assert 30 < len(some.waiting) < 64
    assert len(every.waiting) == 64
    assert every.table()["skipped"] == 136
    assert every.table()["changed_share"] is None


def test_a_shadow_that_fails_harms_nobody(start: Any, photos: list[bytes]) -> None:
    client = start(rc.Undefended(), KEYS, shadow=Failing())
    client.headers["authorization"] = f"Bearer {KEYS[0]}"
    for _ in range(2):
        assert client.post("/v1/classify", **as_json(photos[:2])).status_code == 200
    wait_for(lambda: client.get("/v1/shadow").json()["skipped"] == 4)


class Failing(rc.Undefended):
    """Fails on every photo but the grey one of the start. It has no kind of its own, so that no test finds it."""

    def defend(self, x: View) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if float(x.pixels.std()) > 0:
            raise RuntimeError("of the test")
        return super().defend(x)


def test_flags_choose_the_answers_and_the_shadow(tiny_folder: Path, tmp_path: Path) -> None:
    given = {"model": str(tiny_folder), "labels": "cat, dog", "log_level": "error"}

    def loaded(**fields: Any) -> tuple[rc.defenses.Defense, rc.defenses.Defense | None]:
        model = load_model(Settings.model_validate(given | fields))
        return model.defense, model._shadow.defense if model._shadow else None

    assert loaded(defense="none") == (rc.Undefended(), None)
    assert loaded(shadow="paper") == (rc.Undefended(), rc.ReACT())
    SHADOW.save(tmp_path / "guard.json")
    assert loaded(shadow=str(tmp_path / "guard.json"), config="paper") == (rc.ReACT(), SHADOW)
    with pytest.raises(ReactClipError, match="nowhere"):
        loaded(shadow="nowhere.json")
    with pytest.raises(ReactClipError, match="of SecondLook, and every encoder"):
        loaded(shadow="second_look")
