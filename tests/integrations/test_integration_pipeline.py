"""The defended pipeline beside the stock pipeline of transformers and beside our own guard."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import react_clip as rc

from .conftest import CLOSED, OPEN, check_refusals

LABELS = ["cat", "dog", "teapot", "red car"]
TEMPLATE = "a picture of {}."


@pytest.fixture(scope="module")
def stock(hf_folder: Path) -> Any:
    from transformers import pipeline

    return pipeline("zero-shot-image-classification", model=str(hf_folder), device="cpu")


def scores(answer: list[dict[str, Any]]) -> dict[str, float]:
    assert [set(entry) for entry in answer] == [{"score", "label"}] * len(answer)
    assert [entry["score"] for entry in answer] == sorted((entry["score"] for entry in answer), reverse=True)
    return {entry["label"]: entry["score"] for entry in answer}


def assert_same(ours: Any, theirs: Any, tolerance: float = 1e-5) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert scores(one) == pytest.approx(scores(other), abs=tolerance)


def test_a_closed_guard_is_the_stock_pipeline(stock: Any, hf_folder: Path, photos: list[Path]) -> None:
    pipe = rc.integrations.zero_shot_pipeline(hf_folder, CLOSED)
    names = [str(path) for path in photos]
    for extra in ({}, {"hypothesis_template": TEMPLATE}, {"batch_size": 3}):
        assert_same(pipe(names, candidate_labels=LABELS, **extra), stock(names, candidate_labels=LABELS, **extra))


def test_an_open_guard_gives_the_answers_of_rc(stock: Any, encoder: rc.Encoder, photos: list[Path]) -> None:
    pipe = rc.integrations.zero_shot_pipeline(encoder, OPEN, seed=7)
    images = [Image.open(path) for path in photos]
    pixels = stock.image_processor(images=images, return_tensors="pt", do_normalize=False)["pixel_values"]
    classifier = rc.ZeroShotClassifier(encoder, LABELS, templates=[TEMPLATE])
    found = OPEN(classifier, pixels, seed=7)
    assert found.gated.all()
    expected = found.logits.softmax(-1)
    answers = pipe(images, candidate_labels=LABELS, hypothesis_template=TEMPLATE)
    for answer, row in zip(answers, expected, strict=True):
        assert scores(answer) == pytest.approx(dict(zip(LABELS, row.tolist(), strict=True)), abs=1e-5)
    plain = stock(images, candidate_labels=LABELS, hypothesis_template=TEMPLATE)
    assert any(scores(a) != pytest.approx(scores(b), abs=1e-4) for a, b in zip(answers, plain, strict=True))


def test_every_way_of_giving_images_gives_the_same_answers(encoder: rc.Encoder, photos: list[Path]) -> None:
    pipe = rc.integrations.zero_shot_pipeline(encoder, OPEN)
    reference = [pipe(str(path), candidate_labels=LABELS) for path in photos]
    encoded = base64.b64encode(photos[0].read_bytes()).decode()
    assert_same([pipe(f"data:image/png;base64,{encoded}", candidate_labels=LABELS)], reference[:1])
    assert_same(pipe([path.read_bytes() for path in photos], candidate_labels=LABELS), reference)
    assert_same(pipe([Image.open(path) for path in photos], candidate_labels=LABELS, batch_size=3), reference)
    assert_same(list(pipe((str(path) for path in photos), candidate_labels=LABELS)), reference)


def test_constructor_arguments_of_every_pipeline_work(encoder: rc.Encoder, photos: list[Path]) -> None:
    pipe = rc.integrations.zero_shot_pipeline(encoder, OPEN, batch_size=2, hypothesis_template=TEMPLATE)
    one = pipe(photos[0], candidate_labels=LABELS)
    assert_same([one], [pipe(photos[0], candidate_labels=LABELS, hypothesis_template=TEMPLATE, timeout=3)])
    assert_same([pipe(photos[0], candidate_labels=["dog", "dog"])], [[{"score": 0.5, "label": "dog"}] * 2])


def test_any_encoder_can_be_in_a_pipeline(open_clip_name: str, photos: list[Path]) -> None:
    encoder = rc.load(open_clip_name, device="cpu")
    pipe = rc.integrations.zero_shot_pipeline(encoder, CLOSED)
    classifier = rc.ZeroShotClassifier(encoder, LABELS, templates=["This is a photo of {}."])
    probs = CLOSED(classifier, pipe.preprocess(photos[0])["pixel_values"]).probs[0]
    assert scores(pipe(photos[0], candidate_labels=LABELS)) == pytest.approx(
        dict(zip(LABELS, probs.tolist(), strict=True))
    )


def test_errors_are_one_line(encoder: rc.Encoder, photos: list[Path], tmp_path: Path) -> None:
    pipe, photo = rc.integrations.zero_shot_pipeline(encoder, CLOSED), str(photos[0])
    check_refusals(
        (lambda: pipe("HTTP://example.org/cat.jpg", candidate_labels=LABELS), "not fetched"),
        (lambda: pipe([photo, "https://example.org/cat.jpg"], candidate_labels=LABELS), "not fetched"),
        (lambda: pipe("data:image/png;base64,???", candidate_labels=LABELS), "no valid base64"),
        (lambda: pipe(str(tmp_path / "none.png"), candidate_labels=LABELS), "does not exist"),
        (lambda: pipe(photo, candidate_labels=[]), "the list of labels is empty"),
        (lambda: pipe(photo, candidate_labels="cat, dog"), "the labels are one string"),
        (lambda: rc.integrations.zero_shot_pipeline(encoder), "there is no calibration"),
    )
