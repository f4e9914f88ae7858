"""The benchmark counts right and compares like with like; how fast anything is, no test says."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

import react_clip as rc
from react_clip.bench import BARE, Contender, compare, contenders
from toys import toy_classifier, toy_images

# Tiny models run faster on one thread, and leave the others to other people.
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


def test_every_contender_answers_the_same_images_equally_often() -> None:
    seen: dict[str, list[int]] = {"bare": [], "other": []}

    def contender(label: str, passes: int) -> Contender:
        def answer(pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            seen[label].append(len(pixels))
            return torch.full((len(pixels),), passes), torch.full((len(pixels),), passes - 1)

        return Contender(label, answer)

    bare, other = compare([contender("bare", 1), contender("other", 3)], toy_images(10), batch=4, rounds=2, singles=3)
    assert seen["bare"] == seen["other"] == [4, 4, 2, 1] + [4, 4, 2] * 2 + [1] * 3
    assert (bare.passes, bare.backward_passes, bare.overhead) == (1, 0, pytest.approx(1.0))
    assert (other.passes, other.backward_passes) == (3, 2)
    ratio = bare.images_per_second / other.images_per_second
    assert other.overhead == pytest.approx(ratio / (3 + 2 * 2))
    assert other.milliseconds == pytest.approx(1000 / other.images_per_second)
    assert other.latency_p50 <= other.latency_p99


def test_the_lineup_spends_the_passes_it_reports() -> None:
    clf = toy_classifier()
    images = toy_images(6)
    lineup = contenders(clf, rc.ReACT(), batch=8, defenses={"aom": rc.defenses.AOM()})
    assert [contender.label for contender in lineup] == [
        *(BARE, "all 14 passes", "ReACT", "Defend-CLIP as published", "aom")
    ]
    expected = {BARE: 1, "all 14 passes": 14, "Defend-CLIP as published": 31, "aom": 11}
    for contender in lineup:
        before = clf.encoder.encoded
        passes, _ = contender.answer(images)
        assert int(passes.sum()) == clf.encoder.encoded - before
        if contender.label in expected:
            assert passes.tolist() == [expected[contender.label]] * 6


def test_too_little_to_measure_is_refused() -> None:
    with pytest.raises(rc.ReactClipError, match=r"0 rounds .* are too few"):
        compare([Contender("x", lambda pixels: (pixels, pixels))], toy_images(1), batch=1, rounds=0)


def test_the_command_on_a_tiny_model(command: list[str], tiny_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    arguments = [*command, "bench", "--model", str(tiny_folder), "--labels", "cat, dog", "--config", "paper", "--quiet"]
    arguments += ["--images", "6", "--batch", "4", "--rounds", "2", "--singles", "2", "--attacked", "0.5"]
    done = subprocess.run(
        [*arguments, "--defenses", "aom", "--out", str(out)], capture_output=True, text=True, env=ONE_THREAD
    )
    assert done.returncode == 0, done.stderr
    assert "ReACT runs at" in done.stdout
    report = json.loads(out.read_text())
    assert report["attacked"] == 0.5
    assert [row["label"] for row in report["contenders"]][-1] == "aom"
    assert all(row["milliseconds"] > 0 for row in report["contenders"])


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--images", "0", "--images is 0; it must be at least 1"),
        ("--attacked", "1.5", "--attacked is 1.5; it is a share between 0 and 1"),
        ("--defenses", "magic", "defence 'magic' is unknown"),
    ],
)
def test_bad_options_are_one_line(command: list[str], option: str, value: str, message: str) -> None:
    done = subprocess.run([*command, "bench", option, value], capture_output=True, text=True, env=ONE_THREAD)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
