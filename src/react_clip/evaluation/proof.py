"""Proofs of a run: the adversarial images and the answers, which anybody can check on another machine.

A proof is the folder of a run without its unfinished work: ``result.json``, ``images.parquet``, ``recipe.yaml``, the
shards of the clean and adversarial images (uint8) and of the class features, and ``manifest.json`` with the SHA-256 of
every file.

A check compares the hashes and the budgets, then runs the recipe on the stored images again and counts the answers that
differ. Other machines round differently, so a few may. A cell differs if more than 1 % of its answers do (one may in
any case), or if its accuracy in the proof is further from the recomputed one than these answers can move it.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from react_clip import encoders, storage
from react_clip.attacks.problem import budgets, check_in_ball
from react_clip.encoders import Encoder
from react_clip.errors import MissingFileError, ReactClipError, first_line
from react_clip.evaluation import code
from react_clip.evaluation.recipe import CLEAN, LabelledAttack, LabelledDefense, Recipe, title_of
from react_clip.evaluation.results import IMAGES, RESULT, EvaluationResult, SetInfo
from react_clip.evaluation.runner import SetRunner, ShardImages, Span
from react_clip.evaluation.sets import EvaluationSet
from react_clip.evaluation.store import CLASSES, PIXELS, PLAIN, RECIPE, SHARDS, Shard, ShardStore, Tensors
from react_clip.evaluation.yaml import read_yaml
from react_clip.noise import stream_keys
from react_clip.zeroshot import ZeroShotClassifier

if TYPE_CHECKING:
    import pandas as pd

MANIFEST = "manifest.json"
_ALLOWED = 0.01
"""Largest fraction of a cell's answers that may differ."""
_CELL = ["dataset", "attack", "eps", "defense"]


def write_proof(run: str | Path, folder: str | Path) -> Path:
    """Copy what others need to check a finished run into a new folder; returns the manifest."""
    run, folder = Path(run), Path(folder)
    result = EvaluationResult.load(run)
    storage.check_new_folder(folder)
    shards = [sorted((run / SHARDS).rglob(f"{kind}/*.safetensors")) for kind in (CLASSES, PIXELS)]
    if not all(shards):
        raise MissingFileError(f"{run} holds no images; run the evaluation again with `images: {{store: uint8}}`")
    digests = {}
    for file in (*(run / name for name in (RESULT, IMAGES, RECIPE)), *itertools.chain(*shards)):
        name = str(file.relative_to(run))
        with storage.atomic_path(folder / name) as temporary:
            shutil.copyfile(file, temporary)
        digests[name] = storage.sha256_of(folder / name)
    manifest = {name: getattr(result, name) for name in ("created", "command", "commit", "package", "versions")}
    manifest |= {"device": result.device, "seed": result.recipe["seed"], "seeds": result.seeds, "sha256": digests}
    storage.write_text(folder / MANIFEST, json.dumps(manifest, indent=2) + "\n")
    return folder / MANIFEST


# ---------------------------------------------------------------------- checking


def check_proof(
    folder: str | Path, *, device: str | None = None, progress: bool = True
) -> tuple[pd.DataFrame, list[str]]:
    """Compute every cell of a proof again; returns the cells, and what else a reader should know.

    A cell is a row: ``dataset, attack, defense``, the ``answers``, the ``flips`` among them that differ, the strict
    accuracy ``claimed`` in the proof and ``found`` here, and ``passed``.

    Raises if a file is missing or changed, if a photo that was to be attacked has no image, or if an image leaves the
    budget: then nothing is counted.
    """
    import pandas as pd

    folder = Path(folder)
    notes = _check_files(folder)
    result = EvaluationResult.load(folder)
    # Recipe.load would import defences from files in the folder of the proof.
    recipe = Recipe.from_dict(read_yaml(folder / RECIPE))
    encoder = encoders.load(recipe.model, device=device, dtype=recipe.dtype)
    cells = []
    for info in result.sets:
        claims = result.images[result.images["dataset"] == info.name]
        runner = _runner(folder, recipe, encoder, info, claims)
        plain = torch.cat([runner.plain(runner.subject.batch(slice(*span))) for span in runner.spans()])
        cells.append(_compared(_with_plain(claims), _with_plain(runner.run(progress=progress), plain)))
    return pd.concat(cells, ignore_index=True), notes


def _check_files(folder: Path) -> list[str]:
    """Compare the hashes of all files; returns a note if other code made them."""
    path = folder / MANIFEST
    manifest = storage.read_json(path, "give a folder that `react-clip rank --proof` wrote")
    try:
        digests, package = dict(manifest["sha256"]), str(manifest["package"])
    except (KeyError, TypeError, ValueError) as error:
        raise ReactClipError(f"{path} is no manifest of a proof ({first_line(error)}); write the proof again") from None
    there = (str(file.relative_to(folder)) for file in folder.rglob("*.safetensors"))
    if unlisted := [name for name in (RESULT, IMAGES, RECIPE, *there) if name not in digests]:
        raise ReactClipError(f"{path} has no hash of {unlisted[0]}; nothing was checked, write the proof again")
    for name, digest in digests.items():
        storage.verified(folder, name, digest)
    if package == code.package_digest():
        return []
    made = str(manifest.get("commit"))[:12] or "unknown"
    return [f"{folder} was made by another revision of the package (commit {made}); it may answer otherwise"]


@dataclass(frozen=True)
class _ProofStore(ShardStore):
    """The images and class features of a proof; answers are computed again, and nothing is written."""

    predictions: Tensor
    """Classes ``[N]`` that undefended CLIP answered for the clean photos; they decide which photos were attacked."""

    def stored(self, *path: str) -> Shard:
        """A shard of the proof, whatever it was computed from."""
        file = self._file(path)
        try:
            return Shard(load_file(file), "")
        except (OSError, SafetensorError) as error:
            raise ReactClipError(f"{file} cannot be read ({first_line(error)}); nothing was checked") from None

    def get(self, path: tuple[str, ...], about: dict[str, Any], compute: Callable[[], Tensors]) -> Shard:
        if path[-2] == PLAIN:
            return Shard({"prediction": self.predictions[slice(*about["span"])]}, "")
        return self.stored(*path) if path[-2] in (PIXELS, CLASSES) else Shard(compute(), "")


class _Checker(SetRunner):
    """The runner on the images of a proof, which must be complete and within their budgets."""

    def _attacked_images(
        self, item: LabelledAttack, span: Span, clean: ShardImages, chosen: LabelledDefense
    ) -> ShardImages | None:
        images = super()._attacked_images(item, span, clean, chosen)
        if images is None:
            return None
        wanted, name = images.rows + span[0], f"{self.store.folder}: {self.subject.name}, {item.title}"
        if missing := {*wanted.tolist()} ^ {*images.shard.tensors["index"].tolist()}:
            raise ReactClipError(f"{name} has no image of photo {min(missing)}, or one too many; nothing was checked")
        if not item.attack.natural:
            photos = self.subject.batch(wanted)
            keys = stream_keys(photos, self.recipe.seed)
            ball = item.attack.ball(photos, budgets(item.eps, photos, item.attack.most), keys)
            check_in_ball(images.pixels(), ball, name)
        return images


def _runner(folder: Path, recipe: Recipe, encoder: Encoder, info: SetInfo, claims: pd.DataFrame) -> SetRunner:
    once = claims.drop_duplicates("index").sort_values("index")
    store = _ProofStore(folder / SHARDS, torch.tensor(once["clean_prediction"].to_numpy()))
    features = store.stored(info.name, CLEAN, CLASSES, "000000").tensors["features"]
    clf = ZeroShotClassifier.from_features(encoder, info.class_names, features, unique=False)
    starts = range(0, len(once), recipe.batch)
    clean = [store.stored(info.name, CLEAN, PIXELS, f"{start:06d}").tensors for start in starts]
    if torch.cat([shard["index"] for shard in clean]).tolist() != once["index"].tolist():
        raise ReactClipError(f"{folder / IMAGES} has other photos of {info.name} than the proof; nothing was checked")
    pixels, labels = torch.cat([shard[PIXELS] for shard in clean]), torch.tensor(once["label"].to_numpy())
    return _Checker(recipe, EvaluationSet(info, clf, clf, pixels, labels), store)


def _with_plain(answers: pd.DataFrame, predictions: Tensor | None = None) -> pd.DataFrame:
    """The answers, and those of undefended CLIP on the clean photos; by default these are columns of the answers."""
    import pandas as pd

    plain = answers.drop_duplicates("index").sort_values("index").assign(attack=CLEAN, eps=0.0, draw=0)
    plain["prediction"] = plain["clean_prediction"] if predictions is None else predictions.numpy()
    plain = plain.assign(defense="undefended CLIP", robust=plain["prediction"] == plain["label"])
    both = pd.concat([plain, answers]).astype({"dataset": str, "attack": str, "defense": str})
    return both.set_index([*_CELL, "draw", "index"])[["prediction", "robust"]]


def _compared(claims: pd.DataFrame, found: pd.DataFrame) -> pd.DataFrame:
    """Compare the answers cell by cell; one that only one of them has differs."""
    both = claims.join(found, how="outer", lsuffix=" claimed")
    both["flip"] = both["prediction"] != both["prediction claimed"]
    both["claimed"], both["found"] = both["robust claimed"].eq(True), both["robust"].eq(True)
    groups = both.groupby(_CELL, sort=False)
    cells = groups.agg(
        answers=("flip", "size"), flips=("flip", "sum"), claimed=("claimed", "mean"), found=("found", "mean")
    )
    cells = cells.reset_index()
    # Other answers about the clean photos may move the strict accuracy under attack too.
    of_clean = cells[cells["attack"] == CLEAN].set_index("defense")["flips"]
    moved = cells["defense"].map(of_clean).where(cells["attack"] != CLEAN, 0)
    apart = (cells["answers"] * (cells["claimed"] - cells["found"])).abs().round()
    few = cells["flips"] <= (_ALLOWED * cells["answers"]).clip(lower=1)
    cells["passed"] = few & (apart <= cells["flips"] + moved)
    cells["attack"] = [title_of(*at) for at in zip(cells["attack"], cells.pop("eps"), strict=True)]
    return cells
