"""Proofs of a run: the adversarial images and the answers, which anybody can check on another machine.

A proof is the folder of a run without its unfinished work: ``result.json``, ``images.parquet``, ``recipe.yaml``, the
clean and the adversarial images as uint8 (safetensors files per set, column, defence that was known, and batch), the
class features, and ``manifest.json`` with the SHA-256 of every file.

A check compares the hashes and the budgets, then asks every defence about every image again and counts the answers that
differ. Other machines round differently, so a few may. A cell differs if more than 1 % of its answers do (one may in
any case), or if its accuracy in the proof is further from the recomputed one than these answers can move it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

from react_clip import encoders, storage
from react_clip.attacks.base import ADAPTIVE
from react_clip.attacks.problem import budgets
from react_clip.defenses import Defense, Undefended
from react_clip.errors import MissingFileError, ReactClipError, first_line
from react_clip.evaluation import code
from react_clip.evaluation.recipe import CLEAN, LabelledAttack, LabelledDefense, Recipe, title_of
from react_clip.evaluation.results import IMAGES, RESULT, EvaluationResult
from react_clip.evaluation.store import CLASSES, PIXELS, RECIPE, SHARDS, Tensors, slug
from react_clip.evaluation.yaml import read_yaml
from react_clip.noise import stream_keys
from react_clip.preprocess import to_float
from react_clip.zeroshot import ZeroShotClassifier

if TYPE_CHECKING:
    import pandas as pd

MANIFEST = "manifest.json"
_ALLOWED = 0.01
"""Largest fraction of a cell's answers that may differ."""


def write_proof(run: str | Path, folder: str | Path) -> Path:
    """Copy what others need to check a finished run into a new folder; returns the manifest."""
    run, folder = Path(run), Path(folder)
    result = EvaluationResult.load(run)
    storage.check_new_folder(folder)
    files = [run / name for name in (RESULT, IMAGES, RECIPE)]
    for column in _columns(result):
        files += _shards(run, column)
    for file in files:
        with storage.atomic_path(folder / file.relative_to(run)) as temporary:
            shutil.copyfile(file, temporary)
    manifest = {
        **{"created": result.created, "command": result.command, "commit": result.commit, "package": result.package},
        **{"versions": result.versions, "device": result.device},
        **{"seed": result.recipe["seed"], "seeds": result.seeds},
        "files": {str(file.relative_to(run)): storage.sha256_of(folder / file.relative_to(run)) for file in files},
    }
    storage.write_text(folder / MANIFEST, json.dumps(manifest, indent=2) + "\n")
    return folder / MANIFEST


def _columns(result: EvaluationResult) -> list[tuple[str, ...]]:
    """Folders of shards: classes and clean photos of each set, and the images of each attack."""
    columns = [(info.name, CLEAN, kind) for info in result.sets for kind in (CLASSES, PIXELS)]
    attacked = result.images[result.images["attacked"]]
    known = ["defense"] if result.threat == ADAPTIVE else []
    found = attacked[["dataset", "attack", "eps", *known]].drop_duplicates().itertuples(index=False, name=None)
    return [*columns, *((dataset, title_of(attack, eps), *of, PIXELS) for dataset, attack, eps, *of in found)]


def _shards(folder: Path, column: tuple[str, ...]) -> list[Path]:
    place = folder.joinpath(SHARDS, *map(slug, column))
    if not (files := sorted(place.glob("*.safetensors"))):
        raise MissingFileError(f"{place} holds no images; run the evaluation again with `images: {{store: uint8}}`")
    return files


# ---------------------------------------------------------------------- checking


@dataclass(frozen=True)
class CheckedCell:
    """One defence under one attack on one set: in the proof, and computed again."""

    dataset: str
    attack: str
    defense: str
    answers: int
    flips: int
    """Answers that differ."""
    claimed: float
    """Strict accuracy in the proof."""
    found: float
    """Strict accuracy of the answers computed again."""
    passed: bool

    def __str__(self) -> str:
        where, accuracies = f"{self.dataset}, {self.attack}, {self.defense}", (100 * self.claimed, 100 * self.found)
        return "{}: {} of {} answers differ; accuracy {:.2f} % in the proof, {:.2f} % here".format(
            where, self.flips, self.answers, *accuracies
        )


def check_proof(
    folder: str | Path, *, device: str | None = None, progress: bool = True
) -> tuple[list[CheckedCell], list[str]]:
    """Compute every cell of a proof again; returns the cells, and what else a reader should know.

    Raises if a file is missing or changed, if a photo that was to be attacked has no image, or if an image leaves the
    budget: then nothing is counted.
    """
    folder = Path(folder)
    notes = list(_check_files(folder))
    result = EvaluationResult.load(folder)
    # Recipe.load would import defences from files in the folder of the proof.
    recipe = Recipe.from_dict(read_yaml(folder / RECIPE))
    columns = {column: _read(folder, column) for column in _columns(result) if column[-1] == CLASSES}
    encoder = encoders.load(recipe.model, device=device, dtype=recipe.dtype)
    cells = list[CheckedCell]()
    with tqdm(total=len(result.rows), unit="cell", disable=not progress) as bar:
        for info in result.sets:
            features = columns[info.name, CLEAN, CLASSES]["features"]
            clf = ZeroShotClassifier.from_features(encoder, info.class_names, features, unique=False)
            for cell in _SetCheck(folder, result, recipe, clf, info.name).cells():
                cells.append(cell)
                bar.update()
    return cells, notes


def _check_files(folder: Path) -> Iterator[str]:
    """Compare the hashes of all files; yields a note if other code made them."""
    path = folder / MANIFEST
    manifest = storage.read_json(path, "give a folder that `react-clip rank --proof` wrote")
    try:
        files, package = dict(manifest["files"]), str(manifest["package"])
    except (KeyError, TypeError, ValueError) as error:
        raise ReactClipError(f"{path} is no manifest of a proof ({first_line(error)}); write the proof again") from None
    if unlisted := [name for name in (RESULT, IMAGES, RECIPE) if name not in files]:
        raise ReactClipError(f"{path} has no hash of {unlisted[0]}; nothing was checked, write the proof again")
    for name, digest in files.items():
        file = folder / name
        if not file.resolve().is_relative_to(folder.resolve()):
            raise ReactClipError(f"{path} names {name}, which is outside of the folder; nothing was checked")
        if not file.is_file():
            raise MissingFileError(f"{file} is missing; nothing was checked, get the whole proof")
        if storage.sha256_of(file) != digest:
            raise ReactClipError(f"{file} has another hash than in {MANIFEST}; nothing was checked, get it again")
    for file in folder.rglob("*.safetensors"):
        if str(file.relative_to(folder)) not in files:
            raise ReactClipError(f"{file} is not in {MANIFEST}; nothing was checked, remove it")
    if package != code.package_digest():
        made = str(manifest.get("commit"))[:12] or "unknown"
        yield f"{folder} was made by another revision of the package (commit {made}); it may answer otherwise"


def _read(folder: Path, column: tuple[str, ...]) -> Tensors:
    """The tensors of all shards of a column."""
    parts = list[Tensors]()
    for file in _shards(folder, column):
        try:
            parts.append(load_file(file))
        except (OSError, SafetensorError) as error:
            raise ReactClipError(f"{file} cannot be read ({first_line(error)}); nothing was checked") from None
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


@dataclass(frozen=True)
class _SetCheck:
    """One set of a proof, whose images are shown to the defences again."""

    folder: Path
    result: EvaluationResult
    recipe: Recipe
    clf: ZeroShotClassifier
    dataset: str

    def cells(self) -> Iterator[CheckedCell]:
        """What undefended CLIP gets right, then every defence on clean photos and under every attack."""
        rows = self.result.images[self.result.images["dataset"] == self.dataset].sort_values(["draw", "index"])
        photos, once = _read(self.folder, (self.dataset, CLEAN, PIXELS)), rows.drop_duplicates("index")
        if photos["index"].tolist() != once["index"].tolist():
            raise ReactClipError(f"{self.folder / IMAGES} has other photos of {self.dataset} than the proof")
        labels, clean = torch.tensor(once["label"].to_numpy()), photos[PIXELS]
        plain, claimed = self._answers(Undefended(), clean, (0,)), torch.tensor(once["clean_prediction"].to_numpy())
        yield _cell((self.dataset, CLEAN, "undefended CLIP"), plain, claimed[None], plain == labels, claimed == labels)
        for chosen in self.recipe.defenses:
            unattacked = self._answers(chosen.defense, clean, self.result.seeds)
            own, moved = rows[rows["defense"] == chosen.label], 0
            for item in (None, *self.recipe.attacks):
                title, eps = (CLEAN, 0.0) if item is None else (item.label, item.eps)
                claims = own[(own["attack"] == title) & (own["eps"] == eps)]
                answers = unattacked.clone()
                if item is not None and len(index := self._to_attack(item, claims)):
                    images = self._attacked(item, chosen, index, clean)
                    answers[:, index] = self._answers(chosen.defense, images, self.result.seeds)
                right = answers == labels
                robust = right if eps == 0 else right & (unattacked == labels)
                cell = _cell(
                    (self.dataset, title_of(title, eps), chosen.label),
                    answers,
                    torch.tensor(claims["prediction"].to_numpy()).reshape(answers.shape),
                    robust,
                    torch.tensor(claims["robust"].to_numpy()),
                    moved,
                )
                moved = cell.flips if item is None else moved
                yield cell

    def _to_attack(self, item: LabelledAttack, claims: pd.DataFrame) -> Tensor:
        """Places of the photos that an attack must have met."""
        every = item.attack.natural or self.recipe.scoring == "attack_all"
        met = (claims["clean_prediction"] == claims["label"]) | every
        return torch.tensor(claims.loc[met, "index"].unique())

    def _attacked(self, item: LabelledAttack, chosen: LabelledDefense, index: Tensor, clean: Tensor) -> Tensor:
        """The images of some photos; refused if one is missing or leaves the budget."""
        known = [chosen.label] if self.recipe.threat == ADAPTIVE else []
        column = (self.dataset, item.title, *known, PIXELS)
        place, stored = self.folder.joinpath(SHARDS, *map(slug, column)), _read(self.folder, column)
        if missing := set(index.tolist()) ^ set(stored["index"].tolist()):
            raise ReactClipError(f"{place} has no image of photo {min(missing)}, or one too many; nothing was checked")
        images = stored[PIXELS]
        photos = to_float(clean[index])
        radius = budgets(item.eps, photos, item.attack.most)
        excess = item.attack.ball(photos, radius, stream_keys(photos, self.recipe.seed)).excess(to_float(images))
        if not item.attack.natural and excess.max() > 1e-5:
            photo = int(index[excess.argmax()])
            raise ReactClipError(
                f"{place}: the image of photo {photo} exceeds the budget by {255 * excess.max():.3g}/255; "
                "nothing was checked"
            )
        return images

    def _answers(self, defense: Defense, images: Tensor, seeds: tuple[int, ...]) -> Tensor:
        """Classes ``[seeds, N]``."""
        batches = [to_float(batch.to(self.clf.device)) for batch in torch.split(images, self.recipe.batch)]
        return torch.stack(
            [torch.cat([defense(self.clf, x, seed=seed).labels.cpu() for x in batches]) for seed in seeds]
        )


def _cell(
    name: tuple[str, str, str], answers: Tensor, claimed: Tensor, right: Tensor, claimed_right: Tensor, moved: int = 0
) -> CheckedCell:
    """Compare answers; ``moved`` are further answers that may move the accuracy, those about the clean photos."""
    count, flips = answers.numel(), int((answers != claimed).sum())
    apart = abs(int(claimed_right.sum()) - int(right.sum()))
    passed = flips <= max(1, _ALLOWED * count) and apart <= flips + moved
    claim, found = (float(values.double().mean()) for values in (claimed_right, right))
    return CheckedCell(*name, count, flips, claim, found, passed)
