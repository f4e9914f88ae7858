"""Calibration: Algorithm 1 on a small model, the fits, and a threshold that keeps its promise."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import react_clip as rc
from react_clip import data, mappings
from react_clip.attacks import PGD
from react_clip.calibration import (
    SIGMAS,
    Calibration,
    CalibrationPoint,
    _edge_notes,
    calibrate,
    choose_tau,
    fit_mappings,
)
from react_clip.cli import common, main
from react_clip.defenses import AOM
from react_clip.defenses.look_calibration import threshold_for
from react_clip.evaluation.sets import class_source
from toys import patch_encoder, toy_classifier, toy_images, write_photos


@pytest.fixture(scope="module")
def result() -> Calibration:
    clf, images = toy_classifier(), toy_images(40)
    labels = clf(images).argmax(1)
    labels[:4] = (labels[:4] + 1) % 5  # four photos that plain CLIP gets wrong
    with pytest.warns(UserWarning, match="at the edge of the scales that were tried"):
        return calibrate(
            clf, images, labels, budgets=(4 / 255, 32 / 255), sigmas=(0.02, 0.3), steps=3, batch=16, clean_pass=0.9
        )


def test_each_point_is_what_algorithm_1_says(result: Calibration) -> None:
    clf, images = toy_classifier(), toy_images(40)
    images, labels = images[4:], clf(images).argmax(1)[4:]
    # In the same batches of 16: other batches round differently, and sign steps enlarge that.
    parts = list(zip(images.split(16), labels.split(16), strict=True))
    for point in result.points:
        attacked = [PGD(eps=point.eps, steps=3)(clf, x, y, seed=0).images for x, y in parts]
        drift = torch.cat([rc.ReACT(lazy=False)(clf, x).drift for x in attacked]).mean()
        assert point.images == 36
        assert point.mean_drift == pytest.approx(float(drift), rel=1e-5)
        for sigma, accuracy in point.accuracy.items():
            guard = AOM(alpha=2.0, mapping=mappings.Constant(float(sigma)))
            expected = (torch.cat([guard(clf, x).labels for x in attacked]) == labels).float().mean()
            assert accuracy == pytest.approx(float(expected), abs=1e-5)
        assert point.accuracy[f"{point.best_sigma:g}"] == max(point.accuracy.values())
    assert result.config.mapping == result.fits["linear"]


def test_the_threshold_leaves_the_wanted_share_alone(result: Calibration) -> None:
    clf, images = toy_classifier(), toy_images(40)
    opened = torch.cat([result.config(clf, part).gated for part in images.split(16)])
    assert 0 < opened.float().mean() <= 0.1, "a tenth may open, and a higher threshold would open none"


@given(st.lists(st.floats(-1, 5, width=32), min_size=1, max_size=60), st.floats(0.05, 0.99))
def test_any_scores_give_the_smallest_threshold_that_keeps_the_promise(values: list[float], share: float) -> None:
    scores = torch.tensor(values)
    tau = threshold_for(scores, share)
    assert (scores >= tau).float().mean() <= 1 - share + 1e-6
    needed = next(n for n in range(1, len(values) + 1) if n >= share * len(values) - 1e-9)
    assert 0 < tau - sorted(values)[needed - 1] <= 1.1e-4, "a lower threshold would open one gate too many"


def test_fits_recover_the_curves_they_came_from() -> None:
    r = [0.2, 0.7, 1.3, 2.3]
    for curve in (mappings.Linear(0.03, 0.03), mappings.Logistic(0.12, 2.0, 0.8), mappings.PowerLaw(0.06, 0.6)):
        sigma = curve(torch.tensor(r, dtype=torch.float64)).tolist()
        fits, notes = fit_mappings(r, sigma)
        assert not notes
        fitted = fits[curve.kind]
        again = fitted(torch.tensor(r, dtype=torch.float64))
        assert torch.allclose(again, torch.tensor(sigma, dtype=torch.float64), atol=2e-4), curve


@pytest.mark.parametrize(
    ("drifts", "scales", "line", "notes"),
    [
        ([0.2, 0.5, 0.9], [0.1, 0.1, 0.1], mappings.Linear(0.1, 0.0), ["power_law left out: exponent is"]),
        ([0.5, 0.5, 0.5], [0.02, 0.04, 0.06], mappings.Linear(0.04, 0.0), ["power_law left out: all drifts are equal"]),
        ([-0.1, 0.4, 0.9], [0.01, 0.02, 0.03], mappings.Linear(0.012, 0.02), ["power_law left out: it needs drifts"]),
        ([0.2, 0.7, 1.2], [0.03, 0.02, 0.01], mappings.Linear(0.034, -0.02), ["power_law left out: exponent is"]),
    ],
)
def test_a_curve_that_makes_no_sense_is_left_out(
    drifts: list[float], scales: list[float], line: mappings.Linear, notes: list[str]
) -> None:
    fits, left_out = fit_mappings(drifts, scales)
    assert fits["linear"] == line
    assert "power_law" not in fits
    assert [note[: len(says)] for note, says in zip(left_out, notes, strict=True)] == notes


def test_a_best_scale_at_the_edge_of_those_tried_is_noted() -> None:
    assert (min(SIGMAS), max(SIGMAS)) == (0.01, 0.28), "the scales of the paper's sweep reach 0.28"

    def point(eps: float, best: float) -> CalibrationPoint:
        return CalibrationPoint(eps, 1.0, best, {}, 10)

    scales = (0.02, 0.1, 0.05)
    assert _edge_notes([point(0.1, 0.05)], scales) == []
    small, large = _edge_notes([point(1 / 255, 0.02), point(2 / 255, 0.05), point(16 / 255, 0.1)], scales)
    assert "at 1/255 is 0.02, at the edge of the scales that were tried (0.02 to 0.1); try smaller ones" in small
    assert "at 16/255 is 0.1, " in large
    assert large.endswith("try larger ones too")


def test_a_flat_response_still_gives_a_calibration(tmp_path: Path) -> None:
    clf, images = toy_classifier(), toy_images(12)
    labels = clf(images).argmax(1)
    # One candidate is the best scale at every budget, whatever the model answers.
    with pytest.warns(UserWarning, match="at the edge"):
        flat = calibrate(clf, images, labels, budgets=(0.01, 0.1), sigmas=(0.1,), steps=1)
    assert flat.config.mapping == mappings.Linear(0.1, 0.0)
    assert any("power_law left out" in note for note in flat.notes)
    flat.save(tmp_path / "flat.json")
    assert Calibration.load(tmp_path / "flat.json") == flat
    with pytest.raises(rc.ReactClipError, match=r"power_law left out: .*; use mapping='linear' or more photos"):
        calibrate(clf, images, labels, budgets=(0.01, 0.1), sigmas=(0.1,), steps=1, mapping="power_law")


def test_a_calibration_file_is_a_configuration(result: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    result.save(path)
    assert rc.ReACT.load(path) == result.config
    assert Calibration.load(path) == result
    result.config.save(tmp_path / "config.json")
    with pytest.raises(rc.ReactClipError, match="is no calibration of version 1"):
        Calibration.load(tmp_path / "config.json")
    written = json.loads(path.read_text())
    assert len(written["points"]) == 2
    assert set(written["fits"]) >= {"linear"}
    assert written["provenance"]["attack"] == "pgd-3"


def test_impossible_calibrations_are_refused() -> None:
    clf, images = toy_classifier(), toy_images(12)
    labels = clf(images).argmax(1)
    with pytest.raises(rc.ReactClipError, match="mapping 'cubic' is unknown; choose one of linear"):
        calibrate(clf, images, labels, mapping="cubic")
    with pytest.raises(rc.ReactClipError, match="gets 0 of 12 photos right"):
        calibrate(clf, images, (labels + 1) % 5)
    with pytest.raises(rc.ReactClipError, match="too few to fit"):
        calibrate(clf, images, labels, budgets=(0.1,))
    with pytest.raises(rc.ReactClipError, match=r"clean_pass is 95\.0"):
        choose_tau(clf, images, rc.ReACT(), 95.0)


def test_the_command_writes_a_file_and_a_picture(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    encoder = rc.load(tiny_folder)
    rng = np.random.default_rng(0)
    # Photos sorted into folders by what the small CLIP itself says, so that it gets them right.
    clf = rc.ZeroShotClassifier(encoder, ["cat", "dog", "teapot"], templates=["This is a photo of a {}."])
    for i in range(24):
        array = rng.integers(0, 255, (32, 32, 3), np.uint8)
        name = rc.Undefended()(clf, [Image.fromarray(array)]).names[0]
        (tmp_path / "photos" / name).mkdir(parents=True, exist_ok=True)
        Image.fromarray(array).save(tmp_path / "photos" / name / f"{i}.png")
    for name in ("cat", "dog", "teapot"):
        if not (tmp_path / "photos" / name).exists():
            (tmp_path / "photos" / name).mkdir()
            Image.fromarray(rng.integers(0, 255, (32, 32, 3), np.uint8)).save(tmp_path / "photos" / name / "x.png")
    out = tmp_path / "calibration.json"
    arguments = ["calibrate", f"folder:{tmp_path / 'photos'}", "--model", str(tiny_folder), "--steps", "2", "--quiet"]
    arguments += ["--sigmas", "0.02,0.1", "--defense", "react"]
    assert main([*arguments, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "tau" in printed
    assert "at the edge of the scales that were tried (0.02 to 0.1)" in printed, "of two scales each is an edge"
    assert "linear" in printed
    assert rc.ReACT.load(out).tau is not None
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert out.with_suffix(".svg").read_text().startswith("<?xml")
    assert json.loads(out.read_text())["provenance"]["data"]["photos"] >= 24
    assert main([*arguments, "--out", str(out), "--limit", "0"]) == 2
    assert "--limit is 0" in capsys.readouterr().err


def test_the_command_chooses_the_threshold_of_second_look_from_photos_without_labels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "load_encoder", lambda args: patch_encoder())
    photos, out = tmp_path / "photos", tmp_path / "look.json"
    photos.mkdir()
    rng = np.random.default_rng(0)
    for i in range(30):
        array = rng.integers(0, 255, (2, 2, 3), np.uint8)
        Image.fromarray(array).resize((40, 40), Image.Resampling.BICUBIC).save(photos / f"{i}.png")
    assert main(["calibrate", str(photos), "--out", str(out), "--clean-pass", "0.9"]) == 0
    printed = capsys.readouterr().out
    assert "leaves 90% of 30 clean photos alone" in printed
    assert "note: 30 photos are few" in printed
    guard = rc.SecondLook.load(out)
    assert f"threshold {guard.threshold:g} (95 % interval" in printed
    assert json.loads(out.read_text())["provenance"]["photos"] == str(photos)
    classes = ["classify", str(photos / "0.png"), "--config", str(out), "--photos", str(tmp_path / "classes"), "--json"]
    for name in ("a", "b"):
        (tmp_path / "classes" / name).mkdir(parents=True)
        shutil.copy(photos / ("1.png" if name == "a" else "2.png"), tmp_path / "classes" / name)
    assert main(classes) == 0
    row = json.loads(capsys.readouterr().out)["results"][0]
    assert row["passes"] in (1.5692, 2.1385)
    (photos / "broken.png").write_bytes(b"no photo")
    assert main(["calibrate", str(photos), "--out", str(out), "--quiet"]) == 2
    assert "broken.png" in capsys.readouterr().err
    assert main(["calibrate", str(photos / "3.png"), "--out", str(out), "--quiet"]) == 2
    assert "1 photos are too few to calibrate on" in capsys.readouterr().err


def test_encoders_get_the_constants_that_suit_them(tiny_folder: Path) -> None:
    assert rc.ReACT.constants_for("openai/clip-vit-base-patch32") == rc.ReACT()
    assert rc.ReACT.constants_for("openai/clip-vit-base-patch32@main") == rc.ReACT()
    shipped = rc.ReACT.for_encoder("openai/clip-vit-base-patch32")
    assert shipped == rc.ReACT(sequential=0.99), "what is shipped draws views until the answer is settled"
    ours = rc.ReACT.for_encoder("clip-vit-b-16")
    assert ours == rc.ReACT.for_encoder("open_clip:ViT-B-16/openai")
    assert ours != rc.ReACT()
    with pytest.raises(
        rc.ReactClipError, match=r"no calibration for .*run `react-clip calibrate --defense react folder:PHOTOS"
    ):
        rc.ReACT.for_encoder(rc.load(tiny_folder))


def test_the_offline_tower_takes_its_classes_from_the_bank_and_not_from_the_photos_it_is_calibrated_on(
    tmp_path: Path,
) -> None:
    encoder = patch_encoder()
    encoder.name = encoder.weights = "clip-vit-b-16"
    encoder.dim = 512
    for name in ("cat", "dog"):
        write_photos(tmp_path / "photos" / "train" / name)
        write_photos(tmp_path / "plain" / name)
    for folder in ("photos", "plain"):
        dataset = data.load(f"folder:{tmp_path / folder}", root=tmp_path, split="train")
        source = class_source(encoder, dataset, None, tmp_path, average_train=False)
        assert source.description == "label bank"
        clf, _ = source.classifier(encoder)
        assert torch.equal(clf.class_features, rc.LabelBank.load().features(["cat", "dog"]))
