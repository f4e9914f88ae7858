"""What defences do to honest users: answers among everyday names, and search by image.

    python benchmarks/honest_photos.py --data photos/ --heads heads/ --device cuda --dtype bf16

Names: clean ImageNet photos are asked about 10, 100 (drawn five times) and all of the names of ``lvis1203.npz``; an
answer is changed where it is not that of plain CLIP. Search: each test photo of a set looks for the nearest of the
other test photos by its defended feature, without classes; recall@1 is the share whose nearest photo has the same
class. Attacked photos (PGD-10 at 4/255 on the classes of the set) look among clean ones.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from _common import where, write
from torch import Tensor

import react_clip as rc
from react_clip import data
from react_clip.evaluation.sets import class_source
from react_clip.intervals import wilson
from react_clip.preprocess import to_float

DEFENSES: dict[str, rc.Defense] = {"CLIP": rc.Undefended(), "ReACT": rc.ReACT(), "SecondLook": rc.SecondLook()}
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
    result: dict[str, Any] = {}
    for count, draws in ((10, 5), (100, 5), (len(names.names), 1)):
        changed = dict.fromkeys(DEFENSES, 0)
        for draw in range(draws):
            rows = torch.randperm(len(names.names), generator=torch.Generator().manual_seed(draw))[:count]
            chosen = [names.names[row] for row in rows.tolist()]
            clf = rc.ZeroShotClassifier.from_features(encoder, chosen, names.features[rows], unique=False)
            for part in pixels.split(BATCH):
                best = {name: guard(clf, part, seed=draw).logits.argmax(1) for name, guard in DEFENSES.items()}
                for name, answer in best.items():
                    changed[name] += int((answer != best["CLIP"]).sum())
        total = draws * len(pixels)
        result[str(count)] = {
            "answers": total,
            "changed": {name: {"count": n, **_percent(n / total, total)} for name, n in changed.items()},
        }
    return result


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
    """Measure and write ``second-look-honest.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the sets")
    parser.add_argument("--heads", type=Path, required=True, help="folder of class features")
    parser.add_argument("--model", default="clip-vit-b-16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--limit", type=int, help="photos per set")
    args = parser.parse_args()
    began = time.monotonic()
    encoder = rc.load(args.model, device=args.device, dtype=args.dtype)
    result: dict[str, Any] = {
        "what": "answers that a defence changes on clean photos; recall@1 by defended features",
        "model": args.model,
        "dtype": args.dtype,
        "defenses": {name: guard.to_dict() for name, guard in DEFENSES.items()},
        "seeds": "draw of the names: 0 to 4, also the seed of the defence; attack and search: 0",
        "names": changed_answers(encoder, args.data, args.heads, args.limit),
        "search": {name: recall(encoder, name, args.data, args.heads, args.limit) for name in SEARCHED},
    }
    write("second-look-honest.json", {**result, "seconds": round(time.monotonic() - began, 1), **where()})


if __name__ == "__main__":
    main()
