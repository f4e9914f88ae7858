"""Calibration: Algorithm 1 on a small model, the fits, and thresholds that keep their promise."""

from __future__ import annotations

import warnings
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import react_clip as rc
from react_clip import calibration, mappings
from react_clip.attacks import PGD
from react_clip.augment import smaller_copy
from react_clip.calibration import Calibration, calibrate, clean_threshold, fit_mappings
from react_clip.defenses import AOM, SecondLook
from toys import patch_encoder, toy_classifier, toy_images


@pytest.fixture(scope="module")
def result() -> Calibration:
    clf, images = toy_classifier(), toy_images(40)
    labels = clf(images).argmax(1)
    labels[:4] = (labels[:4] + 1) % 5  # four photos that plain CLIP gets wrong
    scales: Any = {"budgets": (4 / 255, 32 / 255), "sigmas": (0.02, 0.3)}
    with pytest.warns(UserWarning, match="40 photos are few for clean_pass 0.9: 60 or more"):
        return calibrate(
            clf, images, labels, **scales, steps=3, batch=16, clean_pass=0.9, base=rc.ReACT(views=4, alpha=1.5)
        )


def test_each_point_is_what_algorithm_1_says(result: Calibration) -> None:
    clf, images = toy_classifier(), toy_images(40)
    images, labels = images[4:], clf(images).argmax(1)[4:]
    # In the same batches of 16: other batches round differently, and sign steps enlarge that.
    parts = list(zip(images.split(16), labels.split(16), strict=True))
    for point in result.points:
        attacked = [PGD(eps=point.eps, steps=3)(clf, x, y, seed=0).images for x, y in parts]
        assert point.images == 36
        drift = torch.cat([rc.ReACT()(clf, x, seed=0).drift for x in attacked])
        assert point.mean_drift == pytest.approx(float(drift.mean()), rel=1e-5)
        for sigma, accuracy in point.accuracy.items():
            guard = AOM(views=4, alpha=1.5, mapping=mappings.Constant(float(sigma)))
            expected = (torch.cat([guard(clf, x, seed=0).labels for x in attacked]) == labels).float().mean()
            assert accuracy == pytest.approx(float(expected), abs=1e-5)
        assert point.accuracy[f"{point.best_sigma:g}"] == max(point.accuracy.values())
    assert result.config == rc.ReACT(views=4, alpha=1.5, tau=result.threshold, mapping=result.fits["linear"])


def test_the_threshold_leaves_the_wanted_fraction_alone(result: Calibration) -> None:
    out = result.config(toy_classifier(), toy_images(40), seed=0)
    assert 0 < out.gate_open.float().mean() <= 0.1, "a tenth may open, and a higher threshold would open none"


@given(st.lists(st.floats(-1, 5, width=32), min_size=1, max_size=60), st.floats(0.05, 0.99))
def test_any_scores_give_the_smallest_threshold_that_keeps_the_promise(values: list[float], share: float) -> None:
    scores = torch.tensor(values)
    threshold = clean_threshold(scores, share)
    assert (scores >= threshold).float().mean() <= 1 - share + 1e-6
    needed = next(n for n in range(1, len(values) + 1) if n >= share * len(values) - 1e-9)
    assert 0 < threshold - sorted(values)[needed - 1] <= 1.1e-4, "a lower threshold would open one gate too many"


def test_fits_recover_the_curves_they_came_from() -> None:
    r = [0.2, 0.7, 1.3, 2.3]
    for curve in (mappings.Linear(0.03, 0.03), mappings.Logistic(0.12, 2.0, 0.8), mappings.PowerLaw(0.06, 0.6)):
        sigma = curve(torch.tensor(r, dtype=torch.float64)).tolist()
        fits, notes = fit_mappings(r, sigma)
        assert not notes
        again = fits[curve.kind](torch.tensor(r, dtype=torch.float64))
        assert torch.allclose(again, torch.tensor(sigma, dtype=torch.float64), atol=2e-4), curve


@pytest.mark.parametrize(
    ("drifts", "scales", "line", "notes"),
    [
        ([0.2, 0.5, 0.9], [0.1, 0.1, 0.1], mappings.Linear(0.1, 0.0), "power_law left out: exponent is"),
        ([0.5, 0.5, 0.5], [0.02, 0.04, 0.06], mappings.Linear(0.04, 0.0), "power_law left out: all drifts are equal"),
        ([-0.1, 0.4, 0.9], [0.01, 0.02, 0.03], mappings.Linear(0.012, 0.02), "power_law left out: it needs drifts"),
    ],
)
def test_a_curve_that_makes_no_sense_is_left_out(
    drifts: list[float], scales: list[float], line: mappings.Linear, notes: str
) -> None:
    fits, left_out = fit_mappings(drifts, scales)
    assert fits["linear"] == line
    assert "power_law" not in fits
    assert [note[: len(notes)] for note in left_out] == [notes]


def test_a_calibration_file_is_a_configuration(result: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    result.save(path)
    assert rc.ReACT.load(path) == result.config
    assert Calibration.load(path) == result
    assert result.provenance["attack"] == "pgd-3"
    result.config.save(tmp_path / "config.json")
    with pytest.raises(rc.ReactClipError):
        Calibration.load(tmp_path / "config.json")
    shipped = Calibration.load(Path(str(files("react_clip") / "assets" / "calibrations" / "clip-vit-b-16.json")))
    assert shipped.config == rc.ReACT.for_encoder("clip-vit-b-16") == rc.ReACT.for_encoder("open_clip:ViT-B-16/openai")
    assert shipped.config != rc.ReACT()
    assert shipped.threshold == 0.5726


def test_impossible_calibrations_are_refused() -> None:
    clf, images = toy_classifier(), toy_images(20)
    labels = clf(images).argmax(1)
    one: Any = {"budgets": (0.01, 0.1), "sigmas": (0.1,), "steps": 1}
    for options, says in (
        ({"mapping": "cubic"}, "mapping 'cubic' is unknown; choose one of linear"),
        ({**one, "clean_pass": 95.0}, r"clean_pass is 95\.0"),
        ({**one, "mapping": "power_law"}, r"power_law left out: .*; use mapping='linear' or more photos"),
    ):
        with pytest.raises(rc.ReactClipError, match=says):
            calibrate(clf, images, labels, **options)
    with pytest.raises(rc.ReactClipError, match="gets 0 of 20 photos right"):
        calibrate(clf, images, (labels + 1) % 5)


# ---------------------------------------------------------------------- SecondLook


def smooth_photos(count: int) -> Tensor:
    """Images without detail, whose smaller copies have nearly the same features."""
    coarse = torch.rand(count, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    return torch.nn.functional.interpolate(coarse, 32, mode="bicubic").clamp(0, 1)


def test_without_classes_second_look_leaves_the_wanted_fraction_of_clean_photos_alone(tmp_path: Path) -> None:
    encoder, images = patch_encoder(), smooth_photos(200)
    result = SecondLook.calibrate(encoder, images, clean_pass=0.9)
    assert isinstance(result.config, SecondLook)
    assert result.config == SecondLook(threshold=None, drift_threshold=result.config.drift_threshold)
    distance = (encoder(images) - encoder.encode(smaller_copy(images, 24))).norm(dim=1)
    assert (distance >= result.config.drift_threshold).sum() == 20
    assert (result.notes, result.photos, result.changed) == ((), 200, None)
    assert result.drift_threshold == result.config.drift_threshold
    result.save(tmp_path / "look.json")
    assert SecondLook.load(tmp_path / "look.json") == result.config
    assert Calibration.load(tmp_path / "look.json") == result
    base = SecondLook(alpha=1.0, noise=0.1)
    with pytest.warns(UserWarning, match=r"50 photos are few for clean_pass 0\.97: 200 or more"):
        few = calibration.calibrate_threshold(encoder, images[:50], base=base)
    assert few.config == base.replace(threshold=None, drift_threshold=few.drift_threshold)


@pytest.mark.parametrize("clean_pass", [None, 0.9])
@pytest.mark.filterwarnings("ignore:these classes are fine-grained")
def test_with_classes_second_look_says_whose_answers_change(clean_pass: float | None) -> None:
    """By default one of 200 may change: the threshold lies just below the largest score."""
    encoder, images = patch_encoder(), smooth_photos(200)
    features = encoder(images[:8]) + 0.1 * torch.randn(8, 12, generator=torch.Generator().manual_seed(0))
    clf = rc.ZeroShotClassifier.from_features(encoder, list("abcdefgh"), features)
    result = SecondLook.calibrate(clf, images, clean_pass=clean_pass)
    out, plain = result.config(clf, images, seed=0), clf(images).argmax(1)
    assert out.gated.sum() == (1 if clean_pass is None else 20)
    assert result.changed == tuple((out.labels != plain).nonzero().flatten().tolist())
    assert clean_pass is None or len(result.changed) > 5
    share, low, high = result.changed_share or (0, 0, 0)
    assert share == len(result.changed) / 200
    # Wilson: the shares whose own normal interval just reaches the measured one.
    for bound in (low, high):
        assert (share - bound) ** 2 == pytest.approx(1.96**2 * bound * (1 - bound) / 200, abs=2e-5)
    distance = (encoder(images) - encoder.encode(smaller_copy(images, 24))).norm(dim=1)
    assert (distance >= result.drift_threshold).sum() == (6 if clean_pass is None else 20)


@pytest.mark.parametrize("fine", [True, False])
def test_classes_near_what_lies_beyond_the_copies_are_said_to_be_fine_grained(fine: bool) -> None:
    encoder, images = patch_encoder(), smooth_photos(40)
    features, beyond = encoder(images), SecondLook(drift_threshold=0.0).run(encoder, images, 0).features
    classes = torch.cat([features, beyond]) if fine else torch.stack([features.mean(0), -features.mean(0)])
    clf = rc.ZeroShotClassifier.from_features(encoder, [str(number) for number in range(len(classes))], classes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        notes = SecondLook.calibrate(clf, images).notes
    assert any("fine-grained for 'patches': beyond the small copies 100%" in note for note in notes) is fine


def test_photos_that_cannot_calibrate_are_refused() -> None:
    encoder = patch_encoder()
    alike = smooth_photos(1).expand(40, -1, -1, -1) + torch.linspace(0, 0.001, 40)[:, None, None, None]
    noisy = torch.rand(40, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    photos: Any
    for photos, fraction, says in (
        (alike.clamp(0, 1), 0.97, "the photos are all alike"),
        (noisy, 0.97, "the photos look attacked"),
        (smooth_photos(19), 0.97, "19 photos are too few to calibrate on; give at least 20"),
        (smooth_photos(40), 97.0, r"clean_pass is 97\.0; it is a fraction"),
        ("nowhere.jpg", 0.97, "1 photos are too few to calibrate on; give at least 20"),
        (3.5, 0.97, "images are of type float; give a float tensor"),
    ):
        with pytest.raises(rc.ReactClipError, match=says):
            SecondLook.calibrate(encoder, photos, clean_pass=fraction)
