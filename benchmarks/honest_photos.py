"""What defences do to honest users: answers among everyday names, and search by image.

    python benchmarks/honest_photos.py names --data photos/ --heads heads/
    python benchmarks/honest_photos.py search --data photos/ --heads heads/ --device cuda --dtype bf16

Names: clean ImageNet photos are asked about 10, 100 (drawn five times) and all of the names of ``lvis1203.npz``; an
answer is changed where it is not that of plain CLIP. Search: each test photo of a set looks for the nearest of the
other test photos by its defended feature, without classes; recall@1 is the share whose nearest photo has the same
class. Attacked photos (PGD-10 at 4/255 on the classes of the set) look among clean ones. The result is an entry of
benchmarks/results/honest-photos.json.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from _common import RESULTS, where, write
from torch import Tensor
from tqdm import tqdm

import react_clip as rc
from react_clip import data
from react_clip.defenses.view import View
from react_clip.evaluation.sets import class_source
from react_clip.intervals import wilson
from react_clip.preprocess import to_float

DEFENSES: dict[str, rc.Defense] = {"CLIP": rc.Undefended(), "SecondLook": rc.SecondLook()}
SEARCHED = ("cars196", "oxford_pets")
BATCH = 128


def features(guard: rc.Defense, encoder: rc.Encoder, pixels: Tensor) -> Tensor:
    """Defended unit features ``[N, D]`` without classes."""
    parts = [guard.run(encoder, part.to(encoder.device), 0).features for part in pixels.split(BATCH)]
    return torch.cat(parts)


def changed_answers(encoder: rc.Encoder, root: Path, heads: Path, limit: int | None) -> dict[str, Any]:
    """Share of clean photos whose answer is not that of plain CLIP, by number of names and defence."""
    photos = data.load("imagenet", root=root, limit=limit)
    pixels = to_float(photos.pixels(encoder.preprocessing))
    names = data.load_class_features(heads / "lvis1203.npz")
    vocabularies = []
    for count, draws in ((10, 5), (100, 5), (len(names.names), 1)):
        for draw in range(draws):
            rows = torch.randperm(len(names.names), generator=torch.Generator().manual_seed(draw))[:count]
            chosen = [names.names[row] for row in rows.tolist()]
            vocabularies.append(
                rc.ZeroShotClassifier.from_features(encoder, chosen, names.features[rows], unique=False)
            )
    changed: dict[int, dict[str, int]] = {len(clf.names): dict.fromkeys(DEFENSES, 0) for clf in vocabularies}
    for part in tqdm(pixels.split(BATCH)):
        best = {name: answers(guard, encoder, part, vocabularies) for name, guard in DEFENSES.items()}
        for name, found in best.items():
            for clf, plain, other in zip(vocabularies, best["CLIP"], found, strict=True):
                changed[len(clf.names)][name] += int((plain != other).sum())
    result = {}
    for count, by_defense in changed.items():
        total = len(pixels) * sum(len(clf.names) == count for clf in vocabularies)
        shares = {name: {"count": n, **_percent(n / total, total)} for name, n in by_defense.items()}
        result[str(count)] = {"answers": total, "changed": shares}
    return result


def answers(
    guard: rc.Defense, encoder: rc.Encoder, pixels: Tensor, vocabularies: list[rc.ZeroShotClassifier]
) -> list[Tensor]:
    """The answers ``[B]`` in each vocabulary; views that do not depend on the classes are encoded once."""
    found, recorded = [], list[Any]()
    for clf in vocabularies:
        view = View(encoder, encoder.prepare(pixels), 0, clf, skip_unneeded=False, replay=recorded)
        found.append(guard._answer(view).labels)
        recorded = view.recorded
    return found


def recall(encoder: rc.Encoder, name: str, root: Path, heads: Path, limit: int | None) -> dict[str, Any]:
    """Recall@1 of clean and attacked photos of a set, by defence, in percent."""
    source = class_source(encoder, data.load(name, root=root, limit=limit), heads, root)
    clf, dataset = source.classifier(encoder)
    pixels = to_float(dataset.pixels(encoder.preprocessing))
    labels = torch.tensor(dataset.labels).to(encoder.device)
    attack = rc.attacks.PGD(eps=4 / 255, steps=10)
    pairs = zip(pixels.split(BATCH), labels.split(BATCH), strict=True)
    attacked = torch.cat([attack(clf, part.to(encoder.device), of, seed=0).images.cpu() for part, of in pairs])
    result: dict[str, Any] = {"photos": len(pixels)}
    for defense, guard in DEFENSES.items():
        clean = features(guard, encoder, pixels)
        found = {}
        for kind, queries in (("clean", clean), ("attacked", features(guard, encoder, attacked))):
            similarity = (queries @ clean.T).fill_diagonal_(-2.0)
            hits = labels[similarity.argmax(1)] == labels
            found[kind] = _percent(float(hits.float().mean()), len(hits))
        result[defense] = found
    return result


def _percent(share: float, n: int) -> dict[str, float]:
    value, low, high = wilson(share, n)
    return {"percent": round(100 * value, 2), "low": round(100 * low, 2), "high": round(100 * high, 2)}


def main() -> None:
    """Measure and write the entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("names", "search"))
    parser.add_argument("--data", type=Path, required=True, help="folder of the sets")
    parser.add_argument("--heads", type=Path, required=True, help="folder of class features")
    parser.add_argument("--model", default="clip-vit-b-16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--limit", type=int, help="photos per set")
    args = parser.parse_args()
    began = time.monotonic()
    encoder = rc.load(args.model, device=args.device, dtype=args.dtype)
    given = args.data, args.heads, args.limit
    found = (
        changed_answers(encoder, *given)
        if args.what == "names"
        else {name: recall(encoder, name, *given) for name in SEARCHED}
    )
    about = {"model": args.model, "dtype": args.dtype, "seed": 0, "seconds": round(time.monotonic() - began, 1)}
    about["defenses"] = {name: guard.to_dict() for name, guard in DEFENSES.items()}
    path = RESULTS / "honest-photos.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    write(path.name, before | {args.what: {**where(), **about, "found": found}})


if __name__ == "__main__":
    main()
