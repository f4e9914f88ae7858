r"""Number of anchor views that an attacked image needs: encode all M once, then replay stopping rules offline.

    python benchmarks/sequential_views.py --data photos --heads heads --limit 200 --dtype bf16 --batch 256 \
        --features runs/sequential \
        --datasets caltech101 cifar10 cifar100 dtd10 eurosat flowers102 food26 imagenet oxford_pets stl10

The protocol is that of the tables: only photos that undefended CLIP gets right are attacked, the others pass through
the defence as they are, accuracy is over all. Everything encoded lies in ``--features``, one file a set and budget, so
a run that was stopped goes on where it was. Views are exchangeable: every rule is replayed for ``--orders`` orders of
them, which says more about a rule than one order of few photos could. The result is ``--out``.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _common import where
from safetensors.torch import load_file
from torch import Tensor

from react_clip import ReACT, ZeroShotClassifier, data, functional, load, noise, storage
from react_clip.attacks import PGD
from react_clip.defenses.react import FIRST_VIEWS, anchor_views, logits_of
from react_clip.evaluation.sets import class_source
from react_clip.preprocess import to_pixels

BUDGETS = (1, 4, 8, 16)
RESULT = Path(__file__).parent / "results" / "sequential" / "rules.json"


# ---------------------------------------------------------------------- what is encoded once


def encode(clf: ZeroShotClassifier, guard: ReACT, pixels: Tensor, seed: int, batch: int) -> dict[str, Tensor]:
    """The gate's decision about each image and all M views behind its anchor, whatever the gate says."""
    parts: list[dict[str, Tensor]] = []
    with torch.no_grad():
        for piece in pixels.split(batch):
            keys = noise.stream_keys(piece, seed)
            decision = guard.decide(clf.encoder, piece, keys, logits_of(clf))
            views = anchor_views(clf.encoder, piece, decision.streams, decision.sigma, guard.max_batch)
            found = {"plain": decision.plain, "gated": decision.gated, "passes": decision.passes, "views": views}
            parts.append({name: tensor.cpu() for name, tensor in found.items()})
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def place(args: argparse.Namespace, name: str, budget: int) -> Path:
    """The file with the features of a set at a budget; another model or choice of photos has another folder."""
    setting = f"{args.model}-{args.dtype}-{args.limit}-{args.seed}".replace("/", "_")
    return Path(args.features) / setting / f"{name}-{budget}.safetensors"


def collect(args: argparse.Namespace, guard: ReACT) -> None:
    """Encode what is not there yet: at budget 0 all photos as they are, at N those attacked at N/255."""
    encoder = load(args.model, device=args.device, dtype=args.dtype)
    for name in args.datasets:
        places = {budget: place(args, name, budget) for budget in (0, *args.budgets)}
        if all(path.is_file() for path in places.values()):
            continue
        photos = data.load(name, root=args.data, limit=args.limit, seed=args.seed)
        clf, photos = class_source(encoder, photos, args.heads, args.data).classifier(encoder)
        pixels = torch.stack([to_pixels(photos.image(i), encoder.image_size) for i in range(len(photos))])
        pixels, labels = pixels.to(clf.device), torch.tensor(photos.labels, device=clf.device)
        classes = clf.class_features.cpu()
        if not places[0].is_file():
            found = encode(clf, guard, pixels, args.seed, args.batch)
            storage.write_tensors(places[0], found | {"labels": labels.cpu(), "classes": classes})
        clean = load_file(places[0])
        right = (clean["plain"] @ classes.T).argmax(1) == clean["labels"]
        chosen = right.nonzero().flatten().to(pixels.device)
        for budget in args.budgets:
            if not places[budget].is_file():
                images = torch.cat([
                    PGD(eps=budget / 255, steps=10)(clf, x, y, seed=args.seed).images
                    for x, y in zip(pixels[chosen].split(args.batch), labels[chosen].split(args.batch), strict=True)
                ])  # fmt: skip
                found = encode(clf, guard, images, args.seed, args.batch)
                storage.write_tensors(places[budget], found | {"labels": labels[chosen].cpu(), "classes": classes})
            print(f"{name} {budget}/255: {len(chosen)} of {len(pixels)} photos attacked", flush=True)


# ---------------------------------------------------------------------- what is replayed


Stop = Callable[[Tensor], Tensor]
"""Corrected logits ``[n, k, K]`` of the first k views to whether these are enough, ``[n]``."""


@dataclass(frozen=True)
class Encoded:
    """One file of :func:`collect`."""

    plain: Tensor
    gated: Tensor
    passes: Tensor
    views: Tensor
    labels: Tensor
    classes: Tensor

    def logits(self, features: Tensor) -> Tensor:
        return functional.logits(features, self.classes)

    def answers(self, corrected_labels: Tensor) -> Tensor:
        return torch.where(self.gated, corrected_labels, self.logits(self.plain).argmax(1))


def replay(stop: Stop, rounds: Sequence[int], logits: Tensor) -> tuple[Tensor, Tensor]:
    """The class and the number of views of each image, when views are looked at in this order."""
    total = logits.shape[1]
    labels, drawn = logits.mean(1).argmax(1), torch.full((len(logits),), total)
    left = torch.arange(len(logits))
    for k in rounds:
        if not len(left):
            break
        seen = logits[left, :k]
        enough = stop(seen)
        labels[left[enough]], drawn[left[enough]] = seen.mean(1).argmax(1)[enough], k
        left = left[~enough]
    return labels, drawn


def agreement(count: int) -> Stop:
    """As many prefixes in a row answer alike."""

    def stop(seen: Tensor) -> Tensor:
        prefixes = [seen[:, :k].mean(1).argmax(1) for k in range(seen.shape[1] - count + 1, seen.shape[1] + 1)]
        return torch.stack([prefix == prefixes[-1] for prefix in prefixes]).all(0)

    return stop


def two_best(seen: Tensor) -> Tensor:
    """The logits ``[n, k, 2]`` of the two classes that lead so far."""
    leaders = seen.mean(1).topk(2).indices
    return seen.gather(2, leaders[:, None].expand(-1, seen.shape[1], 2))


def own_variance(total: int, confidence: float) -> Stop:
    """The same test without pooling: the variance of the margin between the two best classes alone."""
    return lambda seen: functional.settled(two_best(seen), total, confidence)


def bernstein(confidence: float) -> Stop:
    """Empirical Bernstein (Audibert et al., 2007) on the margin of the two best classes, its range the observed one."""

    def stop(seen: Tensor) -> Tensor:
        first, second = two_best(seen).unbind(2)
        margin, log = first - second, math.log(3 / (1 - confidence)) / seen.shape[1]
        radius = margin.std(1) * math.sqrt(2 * log) + 3 * (margin.amax(1) - margin.amin(1)) * log
        return margin.mean(1) > radius

    return stop


def rules(total: int) -> dict[str, tuple[Stop, Sequence[int]]]:
    """Everything that is compared, by name."""

    def always(seen: Tensor) -> Tensor:
        return torch.ones(len(seen), dtype=torch.bool)

    shipped, by_two = [FIRST_VIEWS], range(2, total, 2)
    found: dict[str, tuple[Stop, Sequence[int]]] = {f"all {total} views": (always, range(0))}
    found |= {f"{k} views": (always, range(k, k + 1)) for k in (1, 2, 3, 5, 7) if k < total}
    found |= {f"{k} prefixes agree": (agreement(k), range(k, total)) for k in (2, 3)}
    for confidence in (0.9, 0.95, 0.99):
        found[f"empirical Bernstein {confidence}"] = (bernstein(confidence), by_two)
        found[f"own variance {confidence}"] = (own_variance(total, confidence), by_two)
        found[f"sequential {confidence}, two by two"] = (
            partial(functional.settled, total=total, confidence=confidence),
            by_two,
        )
        found[f"sequential {confidence}"] = (partial(functional.settled, total=total, confidence=confidence), shipped)
    return found


def replay_all(found: Encoded, guard: ReACT, orders: Sequence[Tensor]) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Classes and numbers of views by rule, one entry an order."""
    plain = found.plain[:, None]
    logits = found.logits(plain + guard.alpha * (found.views - plain))
    return {
        name: [replay(stop, rounds, logits[:, order]) for order in orders]
        for name, (stop, rounds) in rules(guard.views).items()
    }


def judge(args: argparse.Namespace, guard: ReACT) -> list[dict[str, Any]]:
    """One row per rule, set and budget; passes and changes are those of attacked images (at 0: of all)."""
    generator = torch.Generator().manual_seed(args.seed)
    shuffled = [torch.randperm(guard.views, generator=generator) for _ in range(args.orders - 1)]
    orders = [torch.arange(guard.views), *shuffled]
    rows = []
    for name in args.datasets:
        clean = Encoded(**load_file(place(args, name, 0)))
        untouched = replay_all(clean, guard, orders)
        spared = clean.logits(clean.plain).argmax(1) != clean.labels
        for budget in (0, *args.budgets):
            found = Encoded(**load_file(place(args, name, budget))) if budget else clean
            replayed = replay_all(found, guard, orders) if budget else untouched
            whole = found.answers(replayed[f"all {guard.views} views"][0][0])
            for rule, outcomes in replayed.items():
                answers = torch.stack([found.answers(labels) for labels, _ in outcomes])
                passes = torch.stack([found.passes + drawn * found.gated for _, drawn in outcomes])
                right = (answers == found.labels).sum(1)
                if budget:
                    others = torch.stack([clean.answers(labels) for labels, _ in untouched[rule]])
                    right = right + (others == clean.labels)[:, spared].sum(1)
                rows.append({
                    "rule": rule, "set": name, "budget": budget, "photos": len(clean.labels),
                    "images": len(found.labels), "accuracy": right.double().mean().item() / len(clean.labels),
                    "changed": (answers != whole).double().mean().item(), "passes": passes.double().mean().item(),
                })  # fmt: skip
    return rows


def means(rows: list[dict[str, Any]], budgets: Sequence[int]) -> dict[str, Any]:
    """Accuracy as the mean over sets; changes and passes as the mean over images."""
    chosen = [row for row in rows if row["budget"] in budgets]
    images = sum(row["images"] for row in chosen)
    summary = {"accuracy": statistics.mean(row["accuracy"] for row in chosen)}
    summary |= {key: sum(row[key] * row["images"] for row in chosen) / images for key in ("changed", "passes")}
    return {key: round(value, 5) for key, value in summary.items()}


def summarise(rows: list[dict[str, Any]], budgets: Sequence[int]) -> dict[str, Any]:
    """Every rule over all attacked images, per budget, and per set."""
    table: dict[str, Any] = {}
    for rule in dict.fromkeys(row["rule"] for row in rows):
        mine = [row for row in rows if row["rule"] == rule]
        sets = dict.fromkeys(row["set"] for row in mine)
        table[rule] = {
            "attacked": means(mine, budgets),
            "budgets": {f"{budget}/255": means(mine, [budget]) for budget in (0, *budgets)},
            "sets": {name: means([row for row in mine if row["set"] == name], budgets) for name in sets},
        }
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", nargs="+", required=True)
    parser.add_argument("--data", type=Path, required=True, help="photos/<set>/test/<class>/")
    parser.add_argument("--heads", type=Path, help="class features, <set>.npz")
    parser.add_argument("--limit", type=int, default=200, help="photos a set (%(default)s)")
    parser.add_argument("--budgets", type=int, nargs="+", default=BUDGETS, help="in 1/255 (1 4 8 16)")
    parser.add_argument("--model", default="clip-vit-b-16")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--device")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--orders", type=int, default=20, help="in which the views are replayed (%(default)s)")
    parser.add_argument("--features", type=Path, required=True, help="where encoded views are kept")
    parser.add_argument("--encoded-on", help="the device that encoded them, where it is not this one")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    guard = ReACT.for_encoder(args.model).replace(max_batch=args.batch)
    collect(args, guard)
    rows = judge(args, guard)
    table = summarise(rows, args.budgets)
    counts = {row["set"]: {"photos": row["photos"], "attacked": row["images"]} for row in rows if row["budget"]}
    setting = {key: getattr(args, key) for key in ("model", "dtype", "seed", "orders")}
    setting["encoded_on"] = args.encoded_on or where()["device"]
    result = where() | setting | {"attack": "pgd-10", "guard": guard.to_dict(), "sets": counts, "rules": table}
    storage.write_text(args.out, json.dumps(result, indent=1) + "\n")
    for rule, found in table.items():
        print(f"{rule:28s}", *(f"{key} {value:8.4f}" for key, value in found["attacked"].items()))


if __name__ == "__main__":
    main()
