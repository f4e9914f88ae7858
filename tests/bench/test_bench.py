"""The benchmark counts right and compares contenders on the same images; no test checks a speed."""

from __future__ import annotations

import json
from itertools import pairwise, permutations
from pathlib import Path

import pytest
import torch

import react_clip as rc
from react_clip import cli
from react_clip.bench import BARE, OURS, PLAIN, PUBLISHED, Comparison, Timing, measure
from react_clip.bench.timing import Answer, peak_memory
from react_clip.bench.workload import contenders
from toys import toy_classifier, toy_images


def compare(
    contenders: dict[str, Answer], images: torch.Tensor, *, batch: int, rounds: int = 1, singles: int = 1
) -> list[Timing]:
    comparison = Comparison(contenders, images, batch=batch)
    for _ in measure([comparison], rounds=rounds, singles=singles):
        pass
    return comparison.timings()


def test_every_contender_answers_the_same_images_equally_often() -> None:
    seen: dict[str, list[int]] = {"bare": [], "other": []}

    def contender(label: str, passes: int) -> Answer:
        def answer(pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            seen[label].append(len(pixels))
            return torch.full((len(pixels),), passes), torch.full((len(pixels),), passes - 1)

        return answer

    both = {"bare": contender("bare", 1), "other": contender("other", 3)}
    bare, other = compare(both, toy_images(10), batch=4, rounds=2, singles=3)
    # All of them for the memory, the single images, then the rounds.
    assert seen["bare"] == seen["other"] == [4, 4, 2] + [1] * 3 + [4, 4, 2] * 2
    assert (bare.passes, bare.backward_passes, bare.overhead) == (1, 0, pytest.approx(1.0))
    assert (other.passes, other.backward_passes) == (3, 2)
    ratios = [b / a for a, b in zip(bare.round_milliseconds, other.round_milliseconds, strict=True)]
    assert other.overhead == pytest.approx(sum(ratios) / 2 / (3 + 2 * 2))
    assert other.overhead_range == pytest.approx((min(ratios) / 7, max(ratios) / 7))
    assert other.milliseconds == pytest.approx(1000 / other.images_per_second)
    assert other.latency_p50 <= other.latency_p99


def test_no_contender_always_follows_the_same_one() -> None:
    labels = ("bare", "one", "two")
    turns: list[str] = []

    def contender(label: str) -> Answer:
        def answer(pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            turns.append(label)
            return torch.ones(len(pixels)), torch.zeros(len(pixels))

        return answer

    compare({label: contender(label) for label in labels}, toy_images(1), batch=1, rounds=6)
    rounds = [turns[start : start + 3] for start in range(len(turns) - 18, len(turns), 3)]
    assert [each[0] for each in rounds] == ["bare", "two", "one", "bare", "two", "one"]
    followed = [pair for each in rounds for pair in pairwise(each)]
    assert all(followed.count((a, b)) == 2 for a, b in permutations(labels, 2))


def test_the_lineup_spends_the_passes_it_reports() -> None:
    clf = toy_classifier()
    images = toy_images(6)
    lineup = contenders(clf, rc.ReACT(), batch=8, defenses={"aom": rc.defenses.AOM()})
    assert list(lineup) == [BARE, PLAIN, OURS, PUBLISHED, "aom"]
    expected = {BARE: 1, PLAIN: 14, PUBLISHED: 31, "aom": 11}
    for label, answer in lineup.items():
        before = clf.encoder.encoded
        passes, _ = answer(images)
        assert int(passes.sum()) == clf.encoder.encoded - before
        if label in expected:
            assert passes.tolist() == [expected[label]] * 6


def test_chunks_of_several_comparisons_are_interleaved_and_every_second_round_is_reversed() -> None:
    seen: list[str] = []

    def comparison(label: str, images: int) -> Comparison:
        def answer(pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            seen.append(label)
            return torch.ones(len(pixels)), torch.zeros(len(pixels))

        return Comparison({"bare": answer}, toy_images(images), batch=1)

    comparisons = [comparison("short", 1), comparison("long", 4), comparison("alone", 1)]
    rounds = [seen[-6:] for _ in measure(comparisons, rounds=2, singles=1)]
    assert rounds[0] == ["long", "long", "short", "alone", "long", "long"]
    assert rounds[1] == ["long", "long", "alone", "short", "long", "long"]
    for one in comparisons:
        [timing] = one.timings()
        assert len(timing.round_milliseconds) == 2


@pytest.mark.parametrize("times", [1, 4])
def test_peak_memory_counts_what_is_alive_at_once(times: int) -> None:
    size = 2**22

    def allocate() -> None:
        for _ in range(times):
            block = torch.ones(size, dtype=torch.uint8)
            block.mul_(3)
            del block

    assert size <= peak_memory(allocate, torch.device("cpu")) < 1.1 * size


def test_memory_that_grows_from_batch_to_batch_is_seen() -> None:
    size, blocks = 2**20, []

    def answer(pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        blocks.append(torch.ones(size, dtype=torch.uint8))
        return torch.ones(len(pixels)), torch.zeros(len(pixels))

    [few], [many] = (compare({"grows": answer}, toy_images(n), batch=2) for n in (2, 8))
    assert size <= few.peak_bytes < 1.1 * size
    assert 4 * size <= many.peak_bytes < 4.1 * size


def test_the_command_on_a_tiny_model(
    tiny_folder: Path, tmp_path: Path, own_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bench.json"
    arguments = ["bench", "--model", str(tiny_folder), "--labels", "cat, dog", "--config", "paper", "--quiet"]
    arguments += ["--images", "6", "--batch", "4", "--rounds", "2", "--singles", "2", "--attacked", "0.5"]
    assert cli.main([*arguments, "--defenses", "aom", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "ReACT runs at" in printed
    assert "overhead: time per image /" in printed
    assert "has no text tower" not in printed
    report = json.loads(out.read_text())
    assert report["attacked"] == 0.5
    assert [row["label"] for row in report["contenders"]][-1] == "aom"
    assert all(row["milliseconds"] > 0 for row in report["contenders"])
    assert all(len(row["round_milliseconds"]) == 2 for row in report["contenders"])


def test_a_quick_look_takes_one_image_and_one_round(
    tiny_folder: Path, own_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bench", "--model", str(tiny_folder), "--labels", "cat, dog", "--config", "paper", "--quiet"]
    assert cli.main([*arguments, "--quick", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["images"], report["rounds"], report["singles"]) == (1, 1, 1)
    assert [row["label"] for row in report["contenders"]] == [BARE, PLAIN, OURS]
    assert not any(PUBLISHED in note for note in report["notes"])
    assert all(len(row["round_milliseconds"]) == 1 for row in report["contenders"])
