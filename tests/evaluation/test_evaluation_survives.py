"""Kills, races, full disks and damaged files: a run goes on where it was and ends with the same numbers."""

from __future__ import annotations

import importlib
import logging
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import evaluation_toys
import pytest
import torch
from evaluation_toys import numbers, toy_run

import react_clip as rc
from react_clip.evaluation import EvaluationResult, sets
from react_clip.evaluation.code import code_digest
from react_clip.evaluation.store import ShardStore
from react_clip.storage import held_folder

SMALL: dict[str, Any] = {"attacks": [], "seeds": ()}


def shards_of(folder: Path) -> dict[Path, int]:
    """When each shard was written."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}


def assert_same(folder: Path, other: Path, rows_of: Any) -> None:
    assert rows_of(folder) == rows_of(other)
    assert numbers(EvaluationResult.load(folder)) == numbers(EvaluationResult.load(other))


def goes_on(folder: Path, finished: EvaluationResult, **options: Any) -> None:
    """It keeps what is there and ends with the same numbers; other processes differ in the last bits of diagnostics."""
    written = shards_of(folder)
    assert len(written) >= 5
    again = toy_run(folder, **options)
    assert written.items() <= shards_of(folder).items(), "finished shards are not computed again"
    assert [row.accuracy for row in again.rows] == [row.accuracy for row in finished.rows]
    assert not list(folder.rglob("*.part"))


@pytest.mark.process
def test_a_killed_run_goes_on_where_it_was(finished: Any, tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, evaluation_toys.__file__, str(tmp_path)])
    while process.poll() is None and len(shards_of(tmp_path)) < 8:
        time.sleep(0.002)
    process.kill()
    assert process.wait() == -signal.SIGKILL, "it was to be killed, not to finish"
    goes_on(tmp_path, finished[1])


def test_of_two_runs_on_one_folder_one_is_refused(tmp_path: Path) -> None:
    with held_folder(tmp_path), pytest.raises(rc.ReactClipError, match="is in use by another process; wait"):
        toy_run(tmp_path)


def test_a_full_disk_is_one_line_and_keeps_what_is_finished(finished: Any, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, before[1]))
    try:
        with pytest.raises(rc.ReactClipError, match=r"cannot write .* choose another place"):
            toy_run(tmp_path, images={"store": "none"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    goes_on(tmp_path, finished[1], images={"store": "none"})


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 0xFF
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    "truncated": lambda path, _: path.write_bytes(path.read_bytes()[:-7]),
    "flipped in its numbers": lambda path, _: flip(path, -3),
    "flipped in its header": lambda path, _: flip(path, 40),
    "replaced by another shard": lambda path, other: shutil.copy(other, path),
}


@pytest.fixture(scope="module")
def copy_to_damage(finished: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(finished[0], tmp_path_factory.mktemp("damaged") / "run"))


@pytest.mark.parametrize(
    ("kind", "damage"),
    [*(("images", damage) for damage in DAMAGES), ("react/seed-1", "truncated"), ("plain", "flipped in its numbers")],
)
def test_a_damaged_shard_is_noticed_and_computed_again(
    kind: str, damage: str, copy_to_damage: Path, finished: Any, rows_of: Any, caplog: pytest.LogCaptureFixture
) -> None:
    group = "clean" if kind == "plain" else "pgd-10*"
    path, other = sorted(copy_to_damage.glob(f"shards/data/{group}/{kind}/*.safetensors"))[1:3]
    before = path.read_bytes()
    DAMAGES[damage](path, other)
    with caplog.at_level(logging.WARNING):
        toy_run(copy_to_damage)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [(str(path) in line, "computed again" in line) for line in warnings] == [(True, True)]
    assert path.read_bytes() == before
    assert_same(copy_to_damage, finished[0], rows_of)


def test_other_data_or_weights_are_not_mistaken_for_ours(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    toy_run(tmp_path, **SMALL)
    with caplog.at_level(logging.WARNING):
        again = toy_run(tmp_path, **SMALL, data=evaluation_toys.toy_photos(seed=1))
    assert "computed from something else (other data" in caplog.text
    fresh = toy_run(tmp_path.with_name("fresh"), **SMALL, data=evaluation_toys.toy_photos(seed=1))
    assert repr(again.rows) == repr(fresh.rows)


def test_shards_of_other_code_are_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed: list[str] = []
    monkeypatch.setattr(sets, "code_digest", lambda *classes: repr([c for c in classes if c.__name__ in changed]))

    def computed() -> set[str]:
        """The kinds of shards that a run writes."""
        before = shards_of(tmp_path)
        toy_run(tmp_path, attacks=evaluation_toys.toy_attacks()[:1], seeds=())
        new = [path for path, written in shards_of(tmp_path).items() if before.get(path) != written]
        return {"/".join(path.relative_to(tmp_path / "shards" / "data").parts[:-1]) for path in new}

    everything = computed()
    assert computed() == set(), "the same code: nothing is computed"
    changed.append("ReACT")
    assert computed() == {kind for kind in everything if "react" in kind}, "images are kept"
    changed.append("PGD")
    crafted = {kind for kind in everything if kind.startswith("pgd") and kind.endswith("images")}
    assert computed() == {*crafted, "checks"}, "the self-check is PGD too"


@pytest.mark.parametrize(
    "line",
    ["from .helper import x", "from att_package.helper import x", "from .import helper", "import att_package.helper"],
)
def test_the_digest_of_code_follows_its_imports_and_not_its_comments(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def digest(folder: str, helper: str) -> str:
        package = tmp_path / folder / "att_package"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "guard.py").write_text(f"{line}\nclass Guard: ...\n")
        (package / "helper.py").write_text(helper)
        monkeypatch.syspath_prepend(tmp_path / folder)
        for name in ("att_package", "att_package.guard", "att_package.helper"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        return code_digest(importlib.import_module("att_package.guard").Guard)

    assert digest("one", "x = 1") == digest("two", "x = 1  # again") != digest("three", "x = 2")


def test_a_class_without_a_file_is_never_mistaken_for_another() -> None:
    def digest() -> str:
        cell = {"__name__": "cell"}
        exec("class Guard:\n    def defend(self, x):\n        return x", cell)
        return code_digest(cell["Guard"])  # type: ignore[arg-type]

    assert digest() != digest()


def test_labels_cannot_leave_the_folder(tmp_path: Path) -> None:
    store = ShardStore(tmp_path / "shards")
    store.write(("folder:../../up", "..", "/etc"), {}, {"x": torch.zeros(1)})
    assert all(path.is_relative_to(tmp_path / "shards") for path in tmp_path.rglob("*.safetensors"))
    assert len(list((tmp_path / "shards").rglob("*.safetensors"))) == 1


def test_a_folder_with_another_or_a_damaged_recipe_is_refused(tmp_path: Path) -> None:
    toy_run(tmp_path, **SMALL, title="first")
    recipe = tmp_path / "recipe.yaml"
    for prepare, message in (
        (lambda: None, "holds a run of 'first' with 0 in its seed, which"),
        (lambda: recipe.write_text("title: ["), "remove it to continue, or choose another --out"),
        (recipe.unlink, r"has a result\.json but no recipe\.yaml"),
    ):
        prepare()
        with pytest.raises(rc.ReactClipError, match=message):
            toy_run(tmp_path, attacks=[], seed=1, title="second")


# ---------------------------------------------------------------------- a run that grows


def test_a_run_grows_by_what_is_missing_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded, convolve = list[int](), torch.nn.Conv2d.forward

    def counted(self: Any, pixels: torch.Tensor) -> torch.Tensor:
        encoded.append(len(pixels))
        return convolve(self, pixels)

    monkeypatch.setattr(torch.nn.Conv2d, "forward", counted)
    one, two = evaluation_toys.toy_attacks()
    first = toy_run(tmp_path, defenses={"CLIP": rc.Undefended()}, attacks=[one], seeds=())
    shards = shards_of(tmp_path)
    encoded.clear()
    grown = {"defenses": {"CLIP": rc.Undefended(), "again": rc.Undefended()}, "attacks": [one], "seeds": ()}
    result = toy_run(tmp_path, **grown)
    attacked = int(result.images.query("defense == 'again'")["attacked"].sum())
    repeated = 2 * (5 + 5 + 5)  # of each defence: a few images twice in one batch, then in two
    assert sum(encoded) == evaluation_toys.COUNT + attacked + repeated, "no image is crafted again"
    assert [row for row in result.rows if row.defense == "CLIP"] == list(first.rows)
    encoded.clear()
    result = toy_run(tmp_path, **{**grown, "attacks": [one, two], "seeds": (0, 1)})
    assert {(row.attack, row.defense) for row in result.rows} == {
        (attack, label) for attack in ("clean", "pgd-10", "pgd-3") for label in ("CLIP", "again")
    }
    assert set(result.images["seed"]) == {0, 1}
    assert shards.items() <= shards_of(tmp_path).items()
    second_seed, new_images = 2 * (evaluation_toys.COUNT + attacked), 2 * 2 * attacked
    crafted = attacked * (two.steps + 3)  # judged as floats, as 8 bits, and by the run
    assert sum(encoded) == second_seed + new_images + crafted + repeated, "the first attack is not run again"
    for smaller, name in (
        ({**grown, "seeds": (0, 1)}, "'pgd-3' in its attacks"),
        ({**grown, "attacks": [one, two]}, "1 in its seeds"),
        (
            {**grown, "attacks": [one, two], "seeds": (0, 1), "defenses": {"CLIP": rc.ReACT()}},
            "'CLIP' in its def",
        ),
    ):
        with pytest.raises(rc.ReactClipError, match=f"holds a run of .* with {name}.*a run only grows"):
            toy_run(tmp_path, **smaller)
