"""The table of images of a report: some images with their pictures and every defence's answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from PIL.Image import Resampling

from react_clip.evaluation.recipe import CLEAN, title_of
from react_clip.evaluation.results import EvaluationResult
from react_clip.evaluation.store import stored_image
from react_clip.report.page import MOST_IMAGES, Photo, Picture, Shown, picture

_IMAGE = ["dataset", "index"]
_WITH_PICTURES = 40


def table_of_images(result: EvaluationResult, folders: Sequence[Path]) -> tuple[list[str], list[Photo]]:
    """Titles of the answers, and at most 200 images, about equally many of every data set.

    Shown are the first draws of the answers under the attack that leaves least; images on which defences disagree come
    first, at most 40 of them with pictures.
    """
    rows = result.images[result.images["draw"] == result.images["draw"].min()]
    attacked = [row for row in result.means if row.eps and not row.attack.startswith("worst of")]
    worst = min(attacked, key=lambda row: row.accuracy, default=None)
    attack, eps = (worst.attack, worst.eps) if worst else (CLEAN, 0.0)
    rows = rows[(rows["attack"] == attack) & (rows["eps"] == eps)]
    chosen = _chosen(rows)
    names = {info.name: info.class_names for info in result.sets}
    photos: list[Photo] = []
    with_pictures = 0
    for dataset, index in chosen:
        own = rows[(rows["dataset"] == dataset) & (rows["index"] == index)]
        first, classes = own.iloc[0], names[dataset]
        shown = _pictures(folders, dataset, attack, eps, index) if with_pictures < _WITH_PICTURES else ()
        with_pictures += bool(shown)
        answers = [_shown(classes, first["clean_prediction"], first["label"])]
        for _, row in own.iterrows():
            note = f"{row['passes']:.3g} passes, gate {'open' if row['gated'] else 'closed'}"
            answers.append(_shown(classes, row["prediction"], row["label"], note))
        title = f"{dataset} {index}: {_name(classes, first['label'])}"
        photos.append(Photo(title, shown, tuple(answers)))
    return [f"CLIP, {CLEAN}", *(f"{label}, {title_of(attack, eps)}" for label in rows["defense"].unique())], photos


def _chosen(rows: pd.DataFrame) -> list[tuple[str, int]]:
    """Images in turns over the data sets, first those about which the defences disagree."""
    images = rows.groupby(_IMAGE, sort=True)["correct"].agg(lambda right: 0 < right.mean() < 1).reset_index()
    images = images.sort_values("correct", ascending=False, kind="stable")
    images["turn"] = images.groupby("dataset").cumcount()
    chosen = images.sort_values(["turn", "dataset"]).head(MOST_IMAGES)
    return [(str(dataset), int(index)) for dataset, index in chosen[_IMAGE].itertuples(index=False)]


def _name(classes: Sequence[str], number: int) -> str:
    return classes[number] if number < len(classes) else f"class {number}"


def _shown(classes: Sequence[str], answer: int, label: int, note: str = "") -> Shown:
    return Shown(_name(classes, answer), bool(answer == label), note)


def _pictures(folders: Sequence[Path], dataset: str, attack: str, eps: float, index: int) -> tuple[Picture, ...]:
    """The photo, and if it was kept the attacked photo and its perturbation: black to white spans the budget."""
    for folder in folders:
        clean = stored_image(folder, index, dataset, CLEAN)
        if clean is None:
            continue
        found = [picture(clean, "the photo")]
        photo = stored_image(folder, index, dataset, title_of(attack, eps)) if eps else None
        if photo is not None and photo.shape == clean.shape:
            change = photo - clean
            reach = max(eps, float(change.abs().max()))
            found.append(picture(photo, f"attacked, {title_of(attack, eps)}"))
            words = f"the perturbation, magnified {0.5 / reach:.0f} times"
            found.append(picture((change / reach / 2 + 0.5).clamp(0, 1), words, Resampling.NEAREST))
        return tuple(found)
    return ()
