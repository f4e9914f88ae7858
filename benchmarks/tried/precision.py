"""The tower in 16 bits (sums and features in fp32): how often does its gate decide as the one of fp32 does?"""

from __future__ import annotations

import torch
from benchmarks.tried.common import MODEL, attacked, classifier, finish, photos, read_options, turns
from torch import Tensor

import react_clip as rc

WANTED = 0.995
ENOUGH = 2000
"""Photos behind a verdict; fewer are a pilot."""
HALVES = {"cuda": ("bf16", "fp16"), "cpu": ("bf16",)}
"""CPUs compute in fp16 more slowly than in fp32."""


def main() -> None:
    args = read_options("precision", photos=4, batch=4, rounds=2)
    halves = HALVES[args.device.type]
    towers = {name: rc.load(MODEL, device=args.device, dtype=name) for name in ("fp32", *halves)}
    exact, guard = classifier(towers["fp32"]), rc.ReACT.constants_for(MODEL).replace(max_batch=256)
    rough = {
        name: rc.ZeroShotClassifier.from_features(towers[name], exact.names, exact.class_features) for name in halves
    }
    clean = photos(args)
    traffic = {"clean": clean, "attacked": attacked(exact, clean)}
    expected = {kind: answers(guard, exact, images, args.batch) for kind, images in traffic.items()}
    agreement = {
        name: {kind: compared(expected[kind], answers(guard, clf, traffic[kind], args.batch)) for kind in traffic}
        for name, clf in rough.items()
    }
    batch = clean[: args.batch]
    spent = turns(
        args,
        {name: (lambda tower=tower: tower.encode_views(batch)) for name, tower in towers.items()},
        images=len(batch),
    )
    least = {name: min(part["same_gate"] for part in parts.values()) for name, parts in agreement.items()}
    finish(
        args,
        idea="16 bits",
        what=" ".join((__doc__ or "").split()),
        before=spent["fp32"],
        after=spent["bf16"],
        milliseconds=spent,
        agreement=agreement,
        wanted=WANTED,
        reached={name: share >= WANTED for name, share in least.items()} if len(clean) >= ENOUGH else None,
        kept=args.device.type == "cuda",
        why="the service computes in fp16 on a GPU (`--dtype auto`), where gates agree in 99.5 % of 2,000 photos and "
        "more; in bf16, and on a CPU, they do not, and everything else stays in fp32 unless --dtype says otherwise",
    )


def answers(guard: rc.ReACT, clf: rc.ZeroShotClassifier, images: Tensor, batch: int) -> dict[str, Tensor]:
    parts = [guard(clf, part, seed=0) for part in images.split(batch)]
    return {name: torch.cat([getattr(out, name) for out in parts]) for name in ("gated", "labels", "score")}


def compared(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, float]:
    return {
        "photos": len(ours["gated"]),
        "same_gate": (ours["gated"] == theirs["gated"]).float().mean().item(),
        "same_label": (ours["labels"] == theirs["labels"]).float().mean().item(),
        "gated": ours["gated"].float().mean().item(),
        "median_change_of_score": (ours["score"] - theirs["score"]).abs().median().item(),
    }


if __name__ == "__main__":
    main()
