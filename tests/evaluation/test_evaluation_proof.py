"""Proofs: an honest one passes, rounding is counted, and whatever is missing, changed or made up is found."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

import react_clip as rc
from react_clip import storage
from react_clip.cli import main
from react_clip.evaluation import Recipe, run_recipe
from react_clip.evaluation.proof import MANIFEST, check_proof, write_proof
from react_clip.evaluation.recipe import title_of

RECIPE = """
title: Tiny
model: {model}
datasets: [toys]
attacks: [{{kind: pgd, steps: 2, eps: 8/255}}, {{kind: corruption, type: noise, severity: 0.1}}]
defenses: [{{kind: undefended, label: CLIP}}, {{kind: react, calibrated: false, label: ReACT, tau: 0.2, views: 2}}]
seeds: [3, 5]
batch: 8
self_check: false
"""
CELLS = 1 + 2 * 3
"""What is attacked; two defences on clean photos and under two attacks."""


@pytest.fixture(scope="module")
def run(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of a tiny CLIP over twelve random photos."""
    place = tmp_path_factory.mktemp("proof")
    (place / "tiny.yaml").write_text(RECIPE.format(model=tiny_folder))
    for number in range(12):
        folder = place / "data" / "toys" / "test" / f"class {number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 255, (32, 32, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    run_recipe(Recipe.load(place / "tiny.yaml"), place / "run", root=place / "data", progress=False)
    return place / "run"


@pytest.fixture
def proof(run: Path, tmp_path: Path) -> Path:
    return write_proof(run, tmp_path / "proof").parent


def test_an_honest_proof_passes_without_the_data(proof: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells, notes = check_proof(proof, progress=False)
    assert (len(cells), notes) == (CELLS, [])
    assert (cells["passed"] & (cells["flips"] == 0) & (cells["claimed"] == cells["found"])).all()
    claimed = {(cell.attack, cell.defense): cell.claimed for cell in cells.itertuples()}
    for row in rc.EvaluationResult.load(run).rows:
        assert claimed[title_of(row.attack, row.eps), row.defense] == pytest.approx(row.accuracy)
    manifest = json.loads((proof / MANIFEST).read_text())
    assert {"commit", "command", "versions", "device", "package", "seed", "seeds"} <= manifest.keys()
    assert main(["rank", "--check", str(proof), "--quiet"]) == 0
    out = capsys.readouterr().out
    assert out == f"{CELLS} cells checked, 0 differ; 0 of {12 + 24 * 6} answers differ\n"


def test_rank_writes_a_proof_of_each_run(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = str(tmp_path / "ranking.html")
    assert main(["rank", str(run), "--proof", str(tmp_path / "p"), "--out", page, "--quiet"]) == 0
    assert (tmp_path / "p" / MANIFEST).is_file()
    assert main(["rank", str(run), "--proof", str(tmp_path / "p"), "--out", page]) == 2
    assert "is there already" in capsys.readouterr().err
    assert main(["rank", "--check", str(run)]) == 2
    assert f"holds no {MANIFEST}" in capsys.readouterr().err
    for shard in shutil.copytree(run, tmp_path / "bare").rglob("images/*.safetensors"):
        shard.unlink()
    with pytest.raises(rc.ReactClipError, match=r"holds no images; run the evaluation again with `images: {store"):
        write_proof(tmp_path / "bare", tmp_path / "of-bare")


def shard_of(proof: Path) -> Path:
    return sorted(proof.glob("shards/toys/pgd*/images/*.safetensors"))[0]


def sign_again(proof: Path) -> None:
    """Write the hashes of changed files, as somebody would who makes something up."""
    manifest = json.loads((proof / MANIFEST).read_text())
    manifest["sha256"] = {name: storage.sha256_of(proof / name) for name in manifest["sha256"]}
    (proof / MANIFEST).write_text(json.dumps(manifest))


def change_shard(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Path], None]:
    def forge(proof: Path) -> None:
        save_file(change(load_file(shard_of(proof))), shard_of(proof))
        sign_again(proof)

    return forge


def lead_outside(proof: Path) -> None:
    manifest = json.loads((proof / MANIFEST).read_text())
    (proof / MANIFEST).write_text(json.dumps({**manifest, "sha256": {**manifest["sha256"], "../x": ""}}))


def leave_out_what_is_said_to_be_spared(proof: Path) -> None:
    pd.read_parquet(proof / "images.parquet").assign(attacked=False).to_parquet(proof / "images.parquet", index=False)
    shutil.rmtree(shard_of(proof).parent)
    manifest = json.loads((proof / MANIFEST).read_text())
    kept = {name: digest for name, digest in manifest["sha256"].items() if "/pgd" not in name}
    (proof / MANIFEST).write_text(json.dumps({**manifest, "sha256": kept}))
    sign_again(proof)


@pytest.mark.parametrize(
    ("forge", "error"),
    [
        (lambda proof: (proof / "images.parquet").write_bytes(b""), r"images\.parquet has another hash"),
        (lambda proof: shard_of(proof).write_bytes(b""), r"safetensors has another hash"),
        (lambda proof: shard_of(proof).unlink(), r"safetensors is missing"),
        (change_shard(lambda t: {name: tensor[1:].clone() for name, tensor in t.items()}), "has no image of photo"),
        (change_shard(lambda t: {**t, "images": 255 - t["images"]}), "exceeds the budget by"),
        (leave_out_what_is_said_to_be_spared, r"pgd-2-.* cannot be read"),
        (lambda proof: shutil.copy(shard_of(proof), proof / "9.safetensors"), r"no hash of 9\.safetensors"),
        (lead_outside, "which is outside of"),
        (lambda proof: (proof / MANIFEST).write_text("{}"), "is no manifest of a proof"),
        (lambda proof: (proof / MANIFEST).write_text('{"sha256": {}, "package": ""}'), "no hash of result.json"),
    ],
)
def test_what_is_missing_changed_or_not_allowed_is_named_and_nothing_is_counted(
    proof: Path, forge: Callable[[Path], object], error: str
) -> None:
    forge(proof)
    with pytest.raises(rc.ReactClipError, match=error):
        check_proof(proof, progress=False)


def forge_answers(proof: Path, count: int, columns: dict[str, Any]) -> None:
    """Change columns of some answers of ReACT under PGD."""
    frame = pd.read_parquet(proof / "images.parquet")
    rows = frame.index[(frame["defense"] == "ReACT") & (frame["attack"] == "pgd-2")][:count]
    for name, change in columns.items():
        frame.loc[rows, name] = change(frame.loc[rows])
    frame.to_parquet(proof / "images.parquet", index=False)
    sign_again(proof)


def test_rounding_is_counted_and_made_up_answers_fail(proof: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = {"prediction": lambda rows: 1 - rows["prediction"]}
    forge_answers(proof, 1, {**other, "robust": lambda rows: rows["robust"]})
    assert main(["rank", "--check", str(proof), "--quiet"]) == 0, "one answer of 24"
    out = capsys.readouterr().out
    assert "within rounding: toys, pgd-2 8/255, ReACT: 1 of 24 answers differ; accuracy" in out
    forge_answers(proof, 4, other)
    assert main(["rank", "--check", str(proof), "--json", "--quiet"]) == 1
    document = json.loads(capsys.readouterr().out)
    failed = [cell for cell in document["cells"] if not cell["passed"]]
    assert [(cell["attack"], cell["defense"], cell["flips"]) for cell in failed] == [("pgd-2 8/255", "ReACT", 3)]


def test_scores_that_do_not_follow_from_the_answers_fail(proof: Path) -> None:
    forge_answers(proof, 24, {"robust": lambda rows: ~rows["robust"].to_numpy(bool) | True})
    cells, _ = check_proof(proof, progress=False)
    assert cells.loc[~cells["passed"], ["defense", "flips", "claimed"]].to_numpy().tolist() == [["ReACT", 0, 1.0]]


def test_another_revision_is_a_note(proof: Path) -> None:
    manifest = json.loads((proof / MANIFEST).read_text())
    (proof / MANIFEST).write_text(json.dumps({**manifest, "package": "other", "commit": "1234567890abcdef"}))
    cells, [note] = check_proof(proof, progress=False)
    assert cells["passed"].all()
    assert "was made by another revision of the package (commit 1234567890ab)" in note
