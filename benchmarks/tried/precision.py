"""The tower in bf16 (sums and features in fp32): how often does its gate decide as the one of fp32 does?"""

from __future__ import annotations

import torch
from benchmarks.tried.common import MODEL, attacked, classifier, finish, photos, read_options, turns

import react_clip as rc

WANTED = 0.995
ENOUGH = 2000
"""Photos behind a verdict; fewer are a pilot."""


def main() -> None:
    args = read_options("precision", photos=4, batch=4, rounds=2)
    towers = {name: rc.load(MODEL, device=args.device, dtype=name) for name in ("fp32", "bf16")}
    exact, guard = classifier(towers["fp32"]), rc.ReACT.for_encoder(MODEL).replace(max_batch=256)
    rough = rc.ZeroShotClassifier.from_features(towers["bf16"], exact.names, exact.class_features)
    clean = photos(args)
    agreement: dict[str, dict[str, float]] = {}
    for kind, images in (("clean", clean), ("attacked", attacked(exact, clean))):
        outs = [[guard(clf, part, seed=0) for part in images.split(max(args.batch, 1))] for clf in (exact, rough)]
        gates, labels, scores = (
            [torch.cat([getattr(out, field) for out in parts]) for parts in outs]
            for field in ("gated", "labels", "score")
        )
        agreement[kind] = {
            "photos": len(images),
            "same_gate": (gates[0] == gates[1]).float().mean().item(),
            "same_label": (labels[0] == labels[1]).float().mean().item(),
            "gated": gates[0].float().mean().item(),
            "median_change_of_score": (scores[0] - scores[1]).abs().median().item(),
        }
    batch = clean[: args.batch]
    spent = turns(
        args,
        {name: (lambda tower=tower: tower.encode_views(batch)) for name, tower in towers.items()},
        images=len(batch),
    )
    finish(
        args,
        idea="bf16",
        what=" ".join((__doc__ or "").split()),
        before=spent["fp32"],
        after=spent["bf16"],
        agreement=agreement,
        wanted=WANTED,
        reached=min(part["same_gate"] for part in agreement.values()) >= WANTED if len(clean) >= ENOUGH else None,
        kept=False,
        why="--dtype bf16 is there to be chosen; fp32 stays the default as long as gates agree in less than 99.5 % of "
        "at least 2,000 photos",
    )


if __name__ == "__main__":
    main()
