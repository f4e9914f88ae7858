"""The throughput benchmark runs and reports what it says, and what is too much for a machine does not stop the rest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch

import react_clip as rc
from react_clip.serve.classes import ClassList
from react_clip.serve.engine import Batch, Engine, OverloadedError, Photo

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "serve_throughput.py"


def test_both_sides_answer_the_same_photos(tiny_folder: Path, photos: list[bytes], tmp_path: Path) -> None:
    folder, out = tmp_path / "photos", tmp_path / "result.json"
    folder.mkdir()
    for number, photo in enumerate(photos[:3]):
        (folder / f"{number}.png").write_bytes(photo)
    options = ["--photos", folder, "--images", 8, "--batch", 4, "--concurrency", 4, "--rounds", 2, "--out", out]
    flags = ["--model", tiny_folder, "--labels", "cat, dog", "--config", "paper", "--threads", 1]
    finished = subprocess.run(
        [sys.executable, BENCHMARK, *map(str, options), "--", *map(str, flags)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    result = json.loads(out.read_text())
    assert result == json.loads(finished.stdout)
    assert result["exit_code"] == 0
    assert (result["images"], result["photos"], result["classes"], result["threads"]) == (8, 3, 2, 1)
    assert "--threads 1" in result["server"]
    assert {"torch", "uvicorn", "python"} <= set(result["versions"])
    assert len(result["rounds"]) == 2
    for one in result["rounds"]:
        assert one["server_images_per_second"] > 0
        assert one["ratio"] == pytest.approx(
            one["server_images_per_second"] / one["library_images_per_second"], abs=0.01
        )
        assert 3 <= one["server_passes"] <= 14
        assert 3 <= one["library_passes"] <= 14
        assert 1 <= one["images_per_batch"] <= 8
    assert result["ratio"] == pytest.approx(
        result["server_images_per_second"] / result["library_images_per_second"], abs=0.01
    )


def test_numbers_must_be_numbers_of_something() -> None:
    finished = subprocess.run([sys.executable, BENCHMARK, "--images", "0"], capture_output=True, text=True, check=False)
    assert finished.returncode == 2
    assert "every number must be at least 1" in finished.stderr


def test_under_overload_those_who_are_answered_are_answered_in_time(
    encoder: rc.Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All at once come twice as many images as can be answered before the deadline."""
    pace, deadline, count = 0.05, 2.0, 80
    preset = ClassList.of(rc.ZeroShotClassifier(encoder, ["cat", "dog"]))
    engine = Engine(encoder, rc.ReACT(), preset, secret=b"0123456789abcdef", batch=80, queue=count, deadline=deadline)
    compute = engine._compute

    def slow(jobs: list[Any]) -> list[Any]:
        time.sleep(pace * len(jobs))
        return compute(jobs)

    monkeypatch.setattr(engine, "_compute", slow)
    batches: list[Batch] = []
    finished: list[float] = []
    try:
        engine.start()
        engine.observer = batches.append
        photo = Photo(torch.full((3, encoder.image_size, encoder.image_size), 0.5), torch.zeros((), dtype=torch.long))
        began = time.monotonic()
        futures = engine.submit([photo] * count, preset)
        for future in futures:
            future.add_done_callback(lambda done: done.exception() or finished.append(time.monotonic() - began))
        wait(futures)
    finally:
        engine.stop()
    answered = [future for future in futures if future.exception() is None]
    assert all(isinstance(future.exception(), OverloadedError) for future in futures if future not in answered)
    assert 1 <= len(answered) < count
    assert len(finished) == len(answered)
    assert max(batch.images for batch in batches) <= deadline / 4 / pace, "no batch is guessed longer than a quarter"
    assert sum(seconds <= deadline for seconds in finished) >= 0.8 * len(answered)
