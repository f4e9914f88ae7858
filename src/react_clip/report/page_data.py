"""Data of a report's page: the summary, and per-image rows with pictures as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from PIL import features
from PIL.Image import Resampling
from torch import Tensor

from react_clip.evaluation.recipe import CLEAN, MEAN, format_eps
from react_clip.evaluation.result import Row
from react_clip.evaluation.store import Pictures
from react_clip.preprocess import data_uri, to_float, to_image
from react_clip.report.run import Run, conditions

# ---------------------------------------------------------------------- words


def summary(run: Run) -> str:
    """Sentences computed from the numbers: the best and worst defence under the strongest attack, and their cost."""
    result = run.result
    means = result.select(dataset=MEAN) if result is not None else []
    if result is None or not means:
        return "There are no finished numbers in this folder yet; see what is missing below."
    plain = next((label for label, entry in run.defenses.items() if entry.get("kind") == "undefended"), "")
    images = sum(info.images for info in result.sets)
    where = f"the mean over {len(result.sets)} data sets" if len(result.sets) > 1 else result.sets[0].name
    sentences = [f"{result.model} on {where} ({images:,} images)."]
    clean = {row.defense: row for row in means if row.attack == CLEAN.label}
    attacked = [row for row in means if row.eps]
    if attacked:
        hardest = max(attacked, key=lambda row: (row.eps, -row.accuracy))
        rows = [row for row in attacked if (row.attack, row.eps) == (hardest.attack, hardest.eps)]
        sentences += _ranking(rows, clean, plain)
    elif clean:
        best = max(clean.values(), key=lambda row: row.accuracy)
        sentences.append(f"No attack was run; on clean images {best.defense} is right most often: {_share(best)}.")
    return " ".join([*sentences, conditions(result), "Brackets hold 95 % intervals."])


def _ranking(rows: Sequence[Row], clean: Mapping[str, Row], plain: str) -> list[str]:
    """Best and worst under one attack, and the accuracy lost on clean images."""
    title = f"{rows[0].attack} {format_eps(rows[0].eps)}"
    found = []
    if undefended := next((row for row in rows if row.defense == plain), None):
        before = f" of {_share(clean[plain])} on clean images" if plain in clean else ""
        found.append(f"The strongest attack, {title}, leaves undefended CLIP {_share(undefended)}{before}.")
    ranked = sorted((row for row in rows if row.defense != plain), key=lambda row: -row.accuracy)
    if not ranked:
        return found
    best, worst = ranked[0], ranked[-1]
    sentence = f"Under {title} the best defence is {best.defense} with {_share(best)}"
    if len(ranked) > 1:
        sentence += f", the worst {worst.defense} with {_share(worst)}"
        if best.low <= ranked[1].high:
            sentence += f"; the interval of {best.defense} overlaps that of {ranked[1].defense}, the runner-up"
    found.append(sentence + ".")
    if plain in clean and all(row.defense in clean for row in ranked):
        costs = {row.defense: 100 * (clean[plain].accuracy - clean[row.defense].accuracy) for row in ranked}
        least, most = min(costs, key=costs.__getitem__), max(costs, key=costs.__getitem__)
        parts = [f"{best.defense} {_cost(costs[best.defense])}"]
        if len(ranked) > 1:
            parts += [f"the dearest is {most} ({_cost(costs[most])})", f"the cheapest {least} ({_cost(costs[least])})"]
        found.append(f"On clean images {'; '.join(parts)}.")
    return found


def _share(row: Row) -> str:
    interval = "" if math.isnan(row.low) else f" [{100 * row.low:.1f}, {100 * row.high:.1f}]"
    return f"{100 * row.accuracy:.1f} %{interval}"


def _cost(points: float) -> str:
    if abs(points) < 0.05:
        return "costs nothing"
    return f"costs {points:.1f} points" if points > 0 else f"gains {-points:.1f} points"


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

Image = tuple[int, int]
"""Number of the data set, and index of the image in it."""


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
        attack = images["attack"] + " " + images["eps"].round(9).astype(str)
        first = images[~attack.duplicated()]
        self.attacks = list(zip(first["attack"], first["eps"].round(9), strict=True))
        set_number, sets = pd.factorize(images["dataset"])
        defense_number, defenses = pd.factorize(images["defense"])
        self.sets, self.defenses = list(map(str, sets)), list(map(str, defenses))
        frame = images.assign(set=set_number, attack=pd.factorize(attack)[0], defense=defense_number)
        self.total, self.images_total = len(frame), len(frame[["set", "index"]].drop_duplicates())
        frame = frame[self._whole_images(frame, limit)]
        self.rows = frame.sort_values(["set", "index", "attack", "defense", "draw"], ignore_index=True)
        self.outcome = outcomes(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def images(self) -> list[Image]:
        """The images whose rows are here."""
        return list(self.rows[["set", "index"]].drop_duplicates().itertuples(index=False, name=None))

    def _whole_images(self, frame: pd.DataFrame, limit: int) -> NDArray[np.bool_]:
        """Mask of the rows to keep: about ``limit``, of whole images evenly spread over the sets, at least one."""
        keep = np.full(self.total, self.total <= limit)
        if self.total > limit:
            per_set = [np.unique(frame["index"][frame["set"] == number]) for number in range(len(self.sets))]
            shares = fair_shares(list(map(len, per_set)), max(1, limit * self.images_total // self.total))
            for number, (found, share) in enumerate(zip(per_set, shares, strict=True)):
                chosen = found[np.linspace(0, len(found) - 1, share).round().astype(int)]
                keep |= (frame["set"] == number).to_numpy() & np.isin(frame["index"], chosen)
        return keep

    def instructive(self) -> list[Image]:
        """Every image, in turns over the sets, first those that a defence saved, broke or did not save."""
        undefended = [self._entries.get(label, {}).get("kind") == "undefended" for label in self.defenses]
        defended = ~np.array(undefended)[self.rows["defense"]]
        queues = []
        for number in range(len(self.sets)):
            here = (self.rows["set"] == number).to_numpy()
            kinds = [self._indices(here & defended & (self.outcome == kind)) for kind in (SAVED, BROKEN, FOOLED)]
            ranked = dict.fromkeys([*_in_turns(kinds), *self._indices(here)])
            queues.append([(number, index) for index in ranked])
        return list(_in_turns(queues))

    def _indices(self, mask: NDArray[np.bool_]) -> list[int]:
        return list(np.unique(self.rows["index"][mask]).tolist())

    def to_json(self, photos: Mapping[str, Any]) -> str:
        """Columns for the page's script, without ``<``, so that no text can end the script element."""
        names: dict[str, int] = {}
        columns: dict[str, Any] = {
            name: self.rows[name].tolist() for name in ("set", "attack", "defense", "index", "draw")
        }
        columns["passes"] = self.rows["passes"].round(2).tolist()
        columns |= {"gate": self.rows["gated"].astype(int).tolist(), "outcome": self.outcome.tolist()}
        columns["attacked"] = self.rows["attacked"].astype(int).tolist()
        for column in ("clean", "plain"):
            columns[column] = self._named(f"{column}_prediction", names)
        columns |= {"label": self._named("label", names), "answer": self._named("prediction", names)}
        for name, scale in _SCALES.items():
            columns[name] = [None if value != value else round(value * scale) for value in self.rows[name].tolist()]
        attacks = [{"title": f"{name} {format_eps(eps)}" if eps else name, "eps": eps} for name, eps in self.attacks]
        data = {
            "scales": _SCALES,
            "sets": self.sets,
            "attacks": attacks,
            "defenses": [{"label": label, "tau": self._entries.get(label, {}).get("tau")} for label in self.defenses],
            "outcomes": list(OUTCOMES),
            "names": list(names),
            "columns": columns,
            "photos": photos,
        }
        return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")

    def _named(self, source: str, names: dict[str, int]) -> list[int]:
        """A column of class numbers as positions in the page's list of class names, which grows as needed."""
        found: dict[Image, int] = {}
        pairs = list(zip(self.rows["set"].tolist(), self.rows[source].tolist(), strict=True))
        for number, label in dict.fromkeys(pairs):
            known = self._class_names.get(self.sets[number], ())
            text = known[label] if 0 <= label < len(known) else f"class {label}"
            found[number, label] = names.setdefault(text, len(names))
        return [found[pair] for pair in pairs]


def outcomes(rows: pd.DataFrame) -> NDArray[np.int64]:
    """The outcome of each row, as its position in :data:`OUTCOMES`."""
    clean, plain = (rows[name] == rows["label"] for name in ("clean_prediction", "plain_prediction"))
    defended = rows["prediction"] == rows["label"]
    return np.select([defended & ~plain, plain & ~defended, defended, clean], [SAVED, BROKEN, RIGHT, FOOLED], WRONG)


def fair_shares(sizes: Sequence[int], total: int) -> list[int]:
    """Split ``total`` evenly; what exceeds a small size goes to the others.

    >>> fair_shares([10, 2, 10], 12)
    [5, 2, 5]
    """
    shares = [0] * len(sizes)
    left = total
    for rank, number in enumerate(sorted(range(len(sizes)), key=sizes.__getitem__)):
        shares[number] = min(sizes[number], left // (len(sizes) - rank))
        left -= shares[number]
    return shares


def _in_turns(queues: Sequence[Sequence[Any]]) -> Iterator[Any]:
    """One item of each queue in turn, until all are empty.

    >>> list(_in_turns([[1, 2, 3], [], [4]]))
    [1, 4, 2, 3]
    """
    nothing = object()
    return (item for item in chain.from_iterable(zip_longest(*queues, fillvalue=nothing)) if item is not nothing)


# ---------------------------------------------------------------------- photos

SIDE = 160
"""Longest side of a picture in the page, in pixels."""


def embedded_photos(folders: Sequence[Path], rows: Rows, count: int) -> dict[str, Any]:
    """Pictures of at most ``count`` images by ``set:index``, instructive ones first.

    Each is ``{"clean": uri, "attacked": {attack: [uri, perturbation's uri, its magnification]}}``. Attacks that know
    the defence make other images for each defence; their key is ``attack:defence``.
    """
    albums = [Pictures(folder) for folder in folders]
    found: dict[str, Any] = {}
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
        found[f"{number}:{index}"] = {"clean": _data_uri(to_float(clean)), "attacked": attacked}
        if len(found) == count:
            break
    return found


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
