"""``react-clip check``: what it counts, its verdicts, where labels come from, and that it continues."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import react_clip as rc
import tiny_clip
from programs import Run
from react_clip.attacks import DIFGSM, PGD
from react_clip.calibration import Calibration
from react_clip.check import ATTACKS, LookAtFeatures, check_tower, judge
from toys import patch_encoder

COUNT = 12


def photos_of(count: int, seed: int = 0) -> Tensor:
    """Smooth images, in 8 bits as files hold them."""
    coarse = torch.rand(count, 3, 2, 2, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.interpolate(coarse, 32, mode="bicubic").clamp(0, 1).mul(255).round() / 255


def classifier() -> rc.ZeroShotClassifier:
    """Classes near the features of the first photos, so that small changes of a pixel matter."""
    encoder = patch_encoder()
    features = encoder(photos_of(COUNT)[:4]) + 0.3 * torch.randn(4, 12, generator=torch.Generator().manual_seed(2))
    return rc.ZeroShotClassifier.from_features(encoder, list("abcd"), features)


def calibrated(guard: rc.SecondLook) -> Calibration:
    return Calibration(guard, guard.threshold, 20, notes=("a note",))


GUARD = rc.SecondLook(threshold=0.05)
FILES = [Path(f"{number}.png") for number in range(COUNT)]


def run_check(folder: Path, labels: Tensor | None = None, clip: Any = None, guard: rc.SecondLook = GUARD) -> Any:
    return check_tower(clip or classifier(), calibrated(guard), FILES, photos_of(COUNT), labels, folder, progress=False)


def test_every_number_is_what_the_definitions_say(tmp_path: Path) -> None:
    clf, x = classifier(), photos_of(COUNT)
    labels = clf(x).argmax(1)
    labels[:2] = (labels[:2] + 1) % 4  # plain CLIP gets two wrong
    found = run_check(tmp_path, labels)
    plain, ours = clf(x).argmax(1), GUARD(clf, x, seed=0).labels
    changed = [
        {"file": str(FILES[n]), "plain": "abcd"[plain[n]], "defended": "abcd"[ours[n]], "label": "abcd"[labels[n]]}
        for n in (plain != ours).nonzero().flatten().tolist()
    ]
    assert 0 < len(changed) < COUNT, "the toy's threshold is chosen so that some answers change"
    assert found["changed"] == changed
    assert found["share"]["value"] == len(changed) / COUNT
    for name, attack in ATTACKS.items():
        images = x.clone()
        right = plain == labels
        images[right] = attack(clf, x[right], labels[right], seed=0).images
        expected = {
            "plain": right & (clf(images).argmax(1) == labels),
            "defended": (ours == labels) & (GUARD(clf, images, seed=0).labels == labels),
        }
        for side, mask in expected.items():
            assert found["attacks"][name][side]["right"] == pytest.approx(float(mask.float().mean()))
    assert found["attacks"]["clean"]["plain"]["right"] == pytest.approx(10 / 12)
    assert found["attacks"]["clean"]["plain"]["passes"] == 1
    assert (found["right"], found["calibrated"], found["measured"]) == ("label", 20, COUNT)
    assert min(found["milliseconds"].values()) > 0
    assert found["notes"][0] == "a note"
    page = (tmp_path / "index.html").read_text()
    assert found["sentence"] in page
    assert page.count("<img") == len(changed)
    assert page.count('class="right"><b>✓') + page.count('class="wrong"><b>✗') == 2 * len(changed)


def test_without_labels_agreement_with_the_clean_answer_counts(tmp_path: Path) -> None:
    found = run_check(tmp_path)
    clean = found["attacks"]["clean"]
    assert (found["right"], clean["plain"]["right"]) == ("plain clean answer", 1)
    assert clean["defended"]["right"] == pytest.approx(1 - found["share"]["value"])
    assert all("label" not in each for each in found["changed"])
    assert 'class="right"' not in (tmp_path / "index.html").read_text(), "nobody knows which answer is right"


def test_without_classes_the_photo_itself_must_be_the_nearest(tmp_path: Path) -> None:
    encoder, x = patch_encoder(), photos_of(COUNT)
    guard = rc.SecondLook(threshold=None, drift_threshold=0.05)
    found = run_check(tmp_path, clip=encoder, guard=guard)
    features, gallery = guard.run(encoder, x, 0).features, encoder(x)
    nearest = (features @ gallery.T).argmax(1)
    clean, recall = found["attacks"]["clean"], float((nearest == torch.arange(COUNT)).float().mean())
    assert (found["right"], clean["plain"]["right"]) == ("recall@1 of the photo itself", 1)
    assert clean["defended"]["right"] == pytest.approx(recall)
    assert clean["defended"]["passes"] > 2
    clf = rc.ZeroShotClassifier.from_features(encoder, [*map(str, FILES)], gallery)
    alone = LookAtFeatures(**vars(guard))(clf, x, seed=0)
    assert torch.equal(alone.features, features), "the gallery decides nothing"
    assert torch.equal(alone.labels, nearest)


@pytest.mark.parametrize(
    ("changed", "gains", "verdict"),
    [
        (9, (0.1, 0.7, 0.3), "helps"),
        (9, (0.09, 0.7, 0.3), "harmless"),
        (0, (0.09, 0.0, -0.1), "does not help"),
        (10, (0.7, 0.7, 0.7), "refuse"),
    ],
)
def test_the_verdict_follows_the_limits(changed: int, gains: tuple[float, ...], verdict: str) -> None:
    found, sentence = judge(changed, 300, dict(zip("abc", gains, strict=True)))
    assert found == verdict
    assert f"{changed} of 300" in sentence
    assert "limit 3 %" in sentence
    assert f"a {100 * gains[0]:+.0f}" in sentence


def test_an_interrupted_check_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run_check(tmp_path)
    for attack in (PGD, DIFGSM):
        monkeypatch.setattr(attack, "search", lambda *args: pytest.fail("the images are there already"))
    assert {**run_check(tmp_path), "milliseconds": None} == {**whole, "milliseconds": None}


def test_labels_that_are_never_right_are_refused(tmp_path: Path) -> None:
    with pytest.raises(rc.ReactClipError, match="plain CLIP gets no photo right, so there is nothing to defend"):
        run_check(tmp_path, (classifier()(photos_of(COUNT)).argmax(1) + 1) % 4)


# ---------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small CLIP with patches small enough for smaller copies."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_clip, "PATCH", 4)
        return tiny_clip.write_hf(tmp_path_factory.mktemp("small"))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """21 photos in each of two class folders."""
    for number, image in enumerate(photos_of(42, seed=1)):
        folder = tmp_path / "photos" / ("golden_retriever", "teapot")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        array = image.mul(255).byte().permute(1, 2, 0).numpy()
        Image.fromarray(np.ascontiguousarray(array)).save(folder / f"{number:02}.png")
    return tmp_path / "photos"


def test_the_command_writes_page_numbers_and_a_calibration_that_others_load(
    run: Run, small: Path, photos: Path, tmp_path: Path
) -> None:
    (photos / "teapot" / "zz.png").write_bytes(b"no image")
    code, out, err = run("check", small, photos, "--out", tmp_path / "out", "--json", "--quiet")
    assert code == 0, err
    assert err.count("\n") == 1, "the photo that cannot be read"
    found = json.loads(out)
    assert json.loads((tmp_path / "out" / "check.json").read_text()) == found
    assert (found["right"], found["calibrated"], found["measured"]) == ("label", 21, 21)
    assert [Path(each["file"]).name for each in found["unreadable"]] == ["zz.png"]
    assert {each["label"] for each in found["changed"]} <= {"golden retriever", "teapot"}
    assert rc.SecondLook.load(found["calibration"]) == Calibration.load(found["calibration"]).config
    assert Calibration.load(found["calibration"]).provenance["photos"] == str(photos)
    answers = ("classify", photos / "teapot", "--model", small, "--labels", "cat, dog", "--seed", 0, "--quiet")
    assert run(*answers, "--config", found["calibration"])[1].count("teapot") == 21


def test_where_classes_and_labels_come_from(
    run: Run, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = patch_encoder()
    monkeypatch.setattr("react_clip.cli.common.load_encoder", lambda args: encoder)
    (tmp_path / "flat").mkdir()
    for path in photos.rglob("*.png"):
        (tmp_path / "flat" / path.name).write_bytes(path.read_bytes())
    named = ["--photos", photos]
    for number, (folder, options, right) in enumerate(
        (
            (photos, named, "label"),
            (tmp_path / "flat", named, "plain clean answer"),
            (photos, [], "recall@1 of the photo itself"),
        )
    ):
        options = [*options, "--out", tmp_path / str(number), "--quiet"]
        code, out, err = run("check", "toy", folder, *options)
        assert code == 0, err
        assert json.loads((tmp_path / str(number) / "check.json").read_text())["right"] == right
        assert out.startswith(("SecondLook ", "Leave SecondLook off"))
