"""Data of a report's page: the summary, and per-image rows with pictures as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from PIL import features
from PIL.Image import Resampling
from torch import Tensor

from react_clip.evaluation.recipe import CLEAN, MEAN, format_eps
from react_clip.evaluation.store import Pictures
from react_clip.preprocess import data_uri, to_float, to_image
from react_clip.report.run import Run


def summary(run: Run) -> dict[str, Any]:
    """Facts for the page's first paragraph; empty while there are no numbers.

    ``ranked`` has the defences under the strongest attack, best first; ``costs`` the points of accuracy that each of
    them loses on clean images, fewest first.
    """
    means = run.result.select(dataset=MEAN) if run.result is not None else []
    if not means:
        return {}
    plain = next((label for label, entry in run.defenses.items() if entry.get("kind") == "undefended"), "")
    clean = {row.defense: row for row in means if row.attack == CLEAN}
    attacked = sorted((row for row in means if row.eps), key=lambda row: (-row.eps, row.accuracy))
    rows = [row for row in attacked if (row.attack, row.eps) == (attacked[0].attack, attacked[0].eps)]
    ranked = sorted((row for row in rows if row.defense != plain), key=lambda row: -row.accuracy)
    costs = {}
    if plain in clean and all(row.defense in clean for row in ranked):
        costs = {row.defense: 100 * (clean[plain].accuracy - clean[row.defense].accuracy) for row in ranked}
    return {
        "attack": f"{rows[0].attack} {format_eps(rows[0].eps)}" if rows else "",
        "plain_clean": clean.get(plain),
        "plain_attacked": next((row for row in rows if row.defense == plain), None),
        "best_clean": max(clean.values(), key=lambda row: row.accuracy, default=None),
        "ranked": ranked,
        "costs": dict(sorted(costs.items(), key=lambda item: item[1])),
    }


# ---------------------------------------------------------------------- rows per image

OUTCOMES = {
    "saved by the defence": "plain CLIP is wrong on this image, the defence is right",
    "broken by the defence": "plain CLIP is right on this image, the defence is wrong",
    "still fooled": "plain CLIP is right on the clean image, wrong on this one, and so is the defence",
    "right all along": "plain CLIP and the defence are right on this image",
    "wrong all along": "plain CLIP is wrong on the clean image and on this one, and so is the defence",
}
"""Each row has exactly one of these outcomes. Plain CLIP is the row's own model, undefended."""
SAVED, BROKEN, FOOLED, RIGHT, WRONG = range(5)
_SCALES = {"r": 1000, "J": 1000, "score": 1000, "sigma": 10000}
"""Measured numbers are stored as integers in units of 1/scale, to keep the page small."""

_CLASSES = {"clean": "clean_prediction", "plain": "plain_prediction", "label": "label", "answer": "prediction"}
"""Columns of classes: their names in the page and in the rows."""

Image = tuple[int, int]
"""Number of the data set, and index of the image in it."""
_IMAGE = ["set", "index"]


def browser(run: Run, limit: int, photos: int, missing: list[str]) -> dict[str, Any] | None:
    """Per-image rows for the template: empty if ``limit`` is 0, ``None`` if the run has none."""
    if limit == 0:
        return {}
    if run.images is None or run.images.empty:
        return None
    rows = Rows(run, run.images, limit)
    pictures = embedded_photos(run.folders, rows, photos)
    if photos and not pictures:
        missing.append("photos were not kept in this folder; run the evaluation with `images: {store: float16}`")
    return {
        "count": f"{len(rows):,} of {rows.total:,} rows ({len(rows.images):,} of {rows.images_total:,} images)",
        "some": len(rows) < rows.total,
        "photos": len(pictures) if photos else None,
        "json": rows.to_json(pictures),
    }


class Rows:
    """The rows that a page holds, image by image; data sets, attacks and defences are numbered."""

    def __init__(self, run: Run, images: pd.DataFrame, limit: int) -> None:
        self._entries = run.defenses
        self._class_names = {info.name: info.class_names for info in run.result.sets} if run.result is not None else {}
        self._classes = int(images[list(_CLASSES.values())].to_numpy().max()) + 1
        set_number, sets = pd.factorize(images["dataset"])
        defense_number, defenses = pd.factorize(images["defense"])
        attack_number, attacks = pd.MultiIndex.from_arrays([images["attack"], images["eps"].round(9)]).factorize()
        self.sets, self.defenses = list(map(str, sets)), list(map(str, defenses))
        self.attacks: list[tuple[str, float]] = list(attacks)
        frame = images.assign(set=set_number, attack=attack_number, defense=defense_number)
        self.total, self.images_total = len(frame), len(frame[_IMAGE].drop_duplicates())
        frame = frame.merge(_evenly(frame, limit), on=_IMAGE)
        self.rows = frame.sort_values([*_IMAGE, "attack", "defense", "draw"], ignore_index=True)
        self.rows["outcome"] = outcomes(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def images(self) -> list[Image]:
        """The images whose rows are here."""
        return _images(self.rows)

    def instructive(self) -> list[Image]:
        """Every image, in turns over the sets, first those that a defence saved, broke or did not save."""
        undefended = np.array([self._entries.get(label, {}).get("kind") == "undefended" for label in self.defenses])
        changed = self.rows[~undefended[self.rows["defense"]] & self.rows["outcome"].isin([SAVED, BROKEN, FOOLED])]
        changed = changed.drop_duplicates([*_IMAGE, "outcome"])
        turn = changed.groupby(["set", "outcome"]).cumcount()
        first = changed.assign(turn=turn).sort_values(["turn", "outcome"])
        ranked = pd.concat([first, self.rows])[_IMAGE].drop_duplicates()
        return _images(ranked.assign(turn=ranked.groupby("set").cumcount()).sort_values(["turn", "set"]))

    def to_json(self, photos: Mapping[str, Any]) -> str:
        """Columns for the page's script, without ``<``, so that no text can end the script element."""
        rows = self.rows
        plain = ("set", "attack", "defense", "index", "draw", "outcome")
        columns = {name: rows[name].tolist() for name in plain}
        columns |= {"gate": rows["gated"].astype(int).tolist(), "attacked": rows["attacked"].astype(int).tolist()}
        columns["passes"] = rows["passes"].round(2).tolist()
        for name, scale in _SCALES.items():
            columns[name] = [None if value != value else round(value * scale) for value in rows[name].tolist()]
        # The names of all sets are one list; a class is its position in it.
        names: list[str] = []
        starts = []
        for name in self.sets:
            starts.append(len(names))
            names += self._class_names.get(name) or [f"class {number}" for number in range(self._classes)]
        for name, column in _CLASSES.items():
            columns[name] = (rows[column] + np.take(starts, rows["set"])).tolist()
        attacks = [{"title": f"{name} {format_eps(eps)}" if eps else name, "eps": eps} for name, eps in self.attacks]
        data = {
            "scales": _SCALES,
            "sets": self.sets,
            "attacks": attacks,
            "defenses": [{"label": label, "tau": self._entries.get(label, {}).get("tau")} for label in self.defenses],
            "outcomes": list(OUTCOMES),
            "names": names,
            "columns": columns,
            "photos": photos,
        }
        return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _evenly(frame: pd.DataFrame, limit: int) -> pd.DataFrame:
    """Images that have about ``limit`` rows, at least one image, in equal parts of all sets and spread over each."""
    images = frame[_IMAGE].drop_duplicates().sort_values(_IMAGE)
    # The places whose multiple of the golden ratio has the smallest fraction are spread evenly, however many are taken.
    fraction = images.groupby("set").cumcount() * ((math.sqrt(5) - 1) / 2) % 1
    turn = fraction.groupby(images["set"]).rank()
    count = max(1, limit * len(images) // len(frame))
    return images.assign(turn=turn).sort_values(["turn", "set"]).head(count)[_IMAGE]


def _images(frame: pd.DataFrame) -> list[Image]:
    return list(frame[_IMAGE].drop_duplicates().itertuples(index=False, name=None))


def outcomes(rows: pd.DataFrame) -> NDArray[np.int64]:
    """The outcome of each row, as its position in :data:`OUTCOMES`."""
    clean, plain = (rows[name] == rows["label"] for name in ("clean_prediction", "plain_prediction"))
    defended = rows["prediction"] == rows["label"]
    return np.select([defended & ~plain, plain & ~defended, defended, clean], [SAVED, BROKEN, RIGHT, FOOLED], WRONG)


# ---------------------------------------------------------------------- photos

SIDE = 160
"""Longest side of a picture in the page, in pixels."""


def embedded_photos(folders: Sequence[Path], rows: Rows, count: int) -> dict[str, Any]:
    """Pictures of at most ``count`` images by ``set:index``, instructive ones first.

    Each is ``{"clean": uri, "attacked": {attack: [uri, perturbation's uri, its magnification]}}``. Attacks that know
    the defence make other images for each defence; their key is ``attack:defence``.
    """
    albums = [Pictures(folder) for folder in folders]
    pictures: dict[str, Any] = {}
    for number, index in rows.instructive() if count else []:
        dataset = rows.sets[number]
        album, clean = next(
            ((album, photo) for album in albums if (photo := album.clean(dataset, index)) is not None), (None, None)
        )
        if album is None or clean is None:
            continue
        attacked: dict[str, list[Any]] = {}
        for attack, (name, eps) in enumerate(rows.attacks):
            for key, defense in (f"{attack}", None), *((f"{attack}:{i}", d) for i, d in enumerate(rows.defenses)):
                photo = album.attacked(dataset, name, eps, index, defense) if eps else None
                if photo is not None and photo.shape == clean.shape:
                    attacked[key] = _attacked(to_float(photo), to_float(clean), eps)
        pictures[f"{number}:{index}"] = {"clean": _data_uri(to_float(clean)), "attacked": attacked}
        if len(pictures) == count:
            break
    return pictures


def _attacked(photo: Tensor, clean: Tensor, eps: float) -> list[Any]:
    # The budget spans black to white; an attack without a fixed budget sets the range by its largest change.
    reach = max(eps, float((photo - clean).abs().max())) or 1.0
    perturbation = ((photo - clean) / reach / 2 + 0.5).clamp(0, 1)
    # Averaging pixels would show the perturbation weaker than it is.
    return [_data_uri(photo), _data_uri(perturbation, Resampling.NEAREST), round(0.5 / reach, 1)]


def _data_uri(pixels: Tensor, resampling: Resampling = Resampling.LANCZOS) -> str:
    picture = to_image(pixels)
    if max(picture.size) > SIDE:
        scale = SIDE / max(picture.size)
        picture = picture.resize((round(picture.width * scale), round(picture.height * scale)), resampling)
    return data_uri(picture, "webp" if features.check("webp") else "jpeg")
