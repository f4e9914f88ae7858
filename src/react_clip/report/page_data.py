"""The rows that a report's page carries: whole images, spread over the sets, as columns of small numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from react_clip.evaluation.recipe import format_eps
from react_clip.report.run import PerImage, Run, defense_settings

OUTCOMES = {
    "saved by the defence": "plain CLIP is wrong on this image, the defence is right",
    "broken by the defence": "plain CLIP is right on this image, the defence is wrong",
    "still fooled": "plain CLIP is right on the clean image, wrong on this one, and so is the defence",
    "right all along": "plain CLIP and the defence are right on this image",
    "wrong all along": "plain CLIP is wrong on the clean image and on this one, and so is the defence",
}
"""What can become of an image; each row has exactly one of these. Plain CLIP is the row's own model, undefended."""

SAVED, BROKEN, FOOLED, RIGHT, WRONG = range(5)
_SCALES = {"r": 1000, "J": 1000, "score": 1000, "sigma": 10000}
"""Diagnostics are kept as whole numbers of these parts: more digits would only be noise."""

Image = tuple[int, int]
"""Number of the set, and of the image in it."""


class Rows:
    """The rows of a run that its page carries, with their texts as numbers of dictionaries."""

    def __init__(self, run: Run, images: PerImage, limit: int) -> None:
        self.total, self.images_total = len(images), 0
        self.sets: list[str] = [str(name) for name in images.values("dataset")]
        self.defenses: list[str] = [str(name) for name in images.values("defense")]
        self._settings = defense_settings(run)
        pairs = list(zip(images["attack"].tolist(), np.round(images["eps"], 9).tolist(), strict=True))
        self.attacks: list[tuple[str, float]] = list(dict.fromkeys(pairs))
        codes = {
            "set": _coded(images["dataset"].tolist(), self.sets),
            "attack": _coded(pairs, self.attacks),
            "defense": _coded(images["defense"].tolist(), self.defenses),
        }
        keep = self._whole_images(codes["set"], images["index"], limit)
        # Image by image, so that the rows of one image stand together.
        order = np.lexsort((images["draw"], codes["defense"], codes["attack"], images["index"], codes["set"]))
        order = order[keep[order]]
        self.codes = {name: values[order] for name, values in codes.items()}
        self.rows = PerImage({name: values[order] for name, values in images.columns.items()})
        self.outcome = outcomes(self.rows)
        self._class_names = _class_names(run)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def images(self) -> list[Image]:
        """The images whose rows are here."""
        return list(dict.fromkeys(zip(self.codes["set"].tolist(), self.rows["index"].tolist(), strict=True)))

    def _whole_images(self, sets: NDArray[Any], index: NDArray[Any], limit: int) -> NDArray[np.bool_]:
        """Which rows belong to the images that fit; the limit is for rows, at least one image stays."""
        per_set = [np.unique(index[sets == number]) for number in range(len(self.sets))]
        self.images_total = sum(map(len, per_set))
        if self.total <= limit:
            return np.ones(self.total, dtype=np.bool_)
        shares = fair_shares([len(found) for found in per_set], max(1, limit * self.images_total // self.total))
        keep = np.zeros(self.total, dtype=np.bool_)
        for number, (found, share) in enumerate(zip(per_set, shares, strict=True)):
            if share:
                chosen = found[np.linspace(0, len(found) - 1, share).round().astype(int)]
                keep |= (sets == number) & np.isin(index, chosen)
        return keep

    def instructive(self) -> list[Image]:
        """Every image, those worth looking at first, evenly over the sets."""
        undefended = [self._settings.get(label, {}).get("kind") == "undefended" for label in self.defenses]
        defended = ~np.array(undefended)[self.codes["defense"]]
        queues = []
        for number in range(len(self.sets)):
            here = self.codes["set"] == number
            kinds = [self._indices(here & defended & (self.outcome == kind)) for kind in (SAVED, BROKEN, FOOLED)]
            ranked = dict.fromkeys([*_in_turns(kinds), *self._indices(here)])
            queues.append([(number, index) for index in ranked])
        return list(_in_turns(queues))

    def _indices(self, mask: NDArray[np.bool_]) -> list[int]:
        return np.unique(self.rows["index"][mask]).tolist()  # type: ignore[no-any-return]

    def to_json(self, photos: Mapping[str, Any]) -> str:
        """Columns for the page's script; no ``<`` is left in it, so that nothing can end the element it stands in."""
        names: dict[str, int] = {}
        columns: dict[str, Any] = {name: values.tolist() for name, values in self.codes.items()}
        columns |= {name: self.rows[name].tolist() for name in ("index", "draw", "passes")}
        columns |= {"gate": self.rows["gated"].astype(int).tolist(), "outcome": self.outcome.tolist()}
        columns["attacked"] = self.rows["attacked"].astype(int).tolist()
        for column, source in (("label",) * 2, ("clean", "clean_prediction"), ("plain", "plain_prediction")):
            columns[column] = self._named(source, names)
        columns["answer"] = self._named("prediction", names)
        for name, scale in _SCALES.items():
            columns[name] = [None if value != value else round(value * scale) for value in self.rows[name].tolist()]
        data = {
            "scales": _SCALES,
            "sets": self.sets,
            "attacks": [
                {"title": f"{name} {format_eps(eps)}" if eps else name, "eps": eps} for name, eps in self.attacks
            ],
            "defenses": [{"label": label, "tau": self._settings.get(label, {}).get("tau")} for label in self.defenses],
            "outcomes": list(OUTCOMES),
            "names": list(names),
            "columns": columns,
            "photos": photos,
        }
        return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")

    def _named(self, source: str, names: dict[str, int]) -> list[int]:
        """Class numbers of a column as numbers of the page's dictionary of names, which grows as needed."""
        found: dict[Image, int] = {}
        for number, label in set(zip(self.codes["set"].tolist(), self.rows[source].tolist(), strict=True)):
            known = self._class_names.get(self.sets[number], ())
            text = known[label] if 0 <= label < len(known) else f"class {label}"
            found[number, label] = names.setdefault(text, len(names))
        return [found[pair] for pair in zip(self.codes["set"].tolist(), self.rows[source].tolist(), strict=True)]


def outcomes(rows: PerImage) -> NDArray[np.int64]:
    """What became of each row's image, as numbers of :data:`OUTCOMES`."""
    clean, plain = (rows[name] == rows["label"] for name in ("clean_prediction", "plain_prediction"))
    defended = rows["prediction"] == rows["label"]
    return np.select([defended & ~plain, plain & ~defended, defended, clean], [SAVED, BROKEN, RIGHT, FOOLED], WRONG)


def fair_shares(sizes: Sequence[int], total: int) -> list[int]:
    """Split ``total`` evenly; what a small one cannot take goes to the others.

    >>> fair_shares([10, 2, 10], 12)
    [5, 2, 5]
    """
    shares = [0] * len(sizes)
    left = total
    smallest_first = sorted(range(len(sizes)), key=sizes.__getitem__)
    for place, number in enumerate(smallest_first):
        shares[number] = min(sizes[number], left // (len(sizes) - place))
        left -= shares[number]
    return shares


def _coded(values: Sequence[Any], known: Sequence[Any]) -> NDArray[np.int64]:
    numbers = {value: number for number, value in enumerate(known)}
    return np.array([numbers[value] for value in values], dtype=np.int64)


def _class_names(run: Run) -> dict[str, tuple[str, ...]]:
    return {info.name: info.class_names for info in run.result.sets} if run.result is not None else {}


def _in_turns(queues: Sequence[Sequence[Any]]) -> Iterator[Any]:
    """One of each, again and again, until all are empty.

    >>> list(_in_turns([[1, 2, 3], [], [4]]))
    [1, 4, 2, 3]
    """
    nothing = object()
    rounds = zip_longest(*queues, fillvalue=nothing)
    return (item for item in chain.from_iterable(rounds) if item is not nothing)
