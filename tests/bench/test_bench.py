"""The benchmark counts right and compares contenders on the same images; no test checks a speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

import react_clip as rc
from programs import Run
from react_clip import attacks
from react_clip.bench import (
    BARE,
    FINETUNING,
    PUBLISHED,
    Comparison,
    Timing,
    contenders,
    published,
    traffic,
)
from react_clip.bench.timing import Answer
from toys import patch_encoder, toy_classifier, toy_images


def compare(lineup: dict[str, Answer], images: Tensor, *, batch: int, rounds: int = 1) -> list[Timing]:
    *_, timings = Comparison(lineup, images, batch=batch).measure(rounds=rounds)
    return timings


def answering(seen: list[int], passes: int) -> Answer:
    """A contender that notes the number of images it is asked about."""

    def answer(pixels: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(len(pixels))
        return torch.full((len(pixels),), passes), torch.full((len(pixels),), passes - 1)

    return answer


def test_every_contender_answers_the_same_images_equally_often() -> None:
    seen: tuple[list[int], list[int]] = ([], [])
    lineup = {"bare": answering(seen[0], 1), "other": answering(seen[1], 3)}
    bare, other = compare(lineup, toy_images(10), batch=4, rounds=2)
    assert seen[0] == seen[1] == [4, 4, 2] * 3, "once for the memory, then the rounds"
    assert (bare.passes, bare.backward_passes, bare.overhead) == (1, 0, pytest.approx(1.0))
    assert (other.passes, other.backward_passes) == (3, 2)
    ratios = [b / a for a, b in zip(bare.round_milliseconds, other.round_milliseconds, strict=True)]
    assert other.overhead == pytest.approx(sum(ratios) / 2 / (3 + 2 * 2))
    assert other.overhead_range == pytest.approx((min(ratios) / 7, max(ratios) / 7))
    assert other.milliseconds == pytest.approx(1000 / other.images_per_second)


def test_contenders_spend_the_passes_that_they_report() -> None:
    encoder, images = patch_encoder(), torch.rand(6, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    clf = rc.ZeroShotClassifier.from_features(encoder, list("ab"), torch.eye(2, 12))
    defenses = [rc.SecondLook(threshold=0.1), rc.ReACT(), rc.defenses.AOM()]
    lineup = {**contenders(clf, defenses), PUBLISHED: published(clf)}
    assert list(lineup) == [BARE, "SecondLook", "ReACT", "AOM", PUBLISHED]
    for label, answer in lineup.items():
        with encoder.counting() as count:
            passes, _ = answer(images)
        assert float(passes.sum()) == pytest.approx(count.forward), label


def test_only_the_chosen_images_are_attacked_and_photos_repeat() -> None:
    clf, photos, eps = toy_classifier(), toy_images(5), 8 / 255
    attack = attacks.PGD(eps=eps, steps=2)
    clean, some = (traffic(clf, photos, attack, count=10, attacked=share, batch=2) for share in (0.0, 0.2))
    assert torch.equal(clean, photos.repeat(2, 1, 1, 1))
    moved = (some - clean).flatten(1).abs().amax(1)
    assert moved.nonzero().flatten().tolist() == [0, 5]
    assert moved.max() <= eps + 1e-6


def test_memory_that_grows_from_batch_to_batch_is_seen() -> None:
    size, blocks = 2**20, []

    def answer(pixels: Tensor) -> tuple[Tensor, Tensor]:
        blocks.append(torch.ones(size, dtype=torch.uint8))
        return torch.ones(len(pixels)), torch.zeros(len(pixels))

    [few], [many] = (compare({"grows": answer}, toy_images(n), batch=2) for n in (2, 8))
    assert size <= few.peak_bytes < 1.1 * size
    assert 4 * size <= many.peak_bytes < 4.1 * size


def test_the_command_measures_the_default_defence_or_its_configuration(
    run: Run, tiny_folder: Path, tmp_path: Path, own_cache: Path
) -> None:
    out, config = tmp_path / "bench.json", tmp_path / "mine.json"
    rc.SecondLook(threshold=0.25, copy_size=None).save(config)
    options = ["--model", tiny_folder, "--labels", "cat, dog", "--config", config, "--quiet", "--out", out]
    small = ["--images", 6, "--batch", 4, "--rounds", 2, "--attacked", 0.5]
    code, printed, err = run("bench", *options, *small, "--defenses", "aom", "--finetuning")
    assert code == 0, err
    assert "SecondLook runs at" in printed
    assert f"x the speed of {PUBLISHED}" in printed
    report = json.loads(out.read_text())
    assert report["attacked"] == 0.5
    assert report["defenses"]["SecondLook"]["threshold"] == 0.25
    assert [row["label"] for row in report["contenders"]] == [BARE, "SecondLook", "AOM", PUBLISHED, FINETUNING]
    assert "arithmetic limit" in printed
    step = report["contenders"][-1]
    assert step["passes"] + 2 * step["backward_passes"] == 10.75, "forward passes a photo"
    assert all(len(row["round_milliseconds"]) == 2 for row in report["contenders"])
