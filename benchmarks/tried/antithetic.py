"""Antithetic views: five draws, each added and subtracted, instead of ten; half of the noise, another anchor."""

from __future__ import annotations

import torch
from benchmarks.tried.common import MODEL, attacked, classifier, finish, photos, read_options, tower, turns
from torch import Tensor

import react_clip as rc
from react_clip import functional, noise


def main() -> None:
    args = read_options("antithetic", photos=2, rounds=3)
    clf, guard = classifier(tower(args)), rc.ReACT.for_encoder(MODEL)
    clean = photos(args)
    right = clf(clean).argmax(-1)
    images = attacked(clf, clean)
    plain = clf.encoder.encode_views(images)
    keys = noise.stream_keys(images, 0)
    sigma = guard(clf, images, seed=0).sigma.float()

    def independent() -> list[Tensor]:
        return [noise.noisy_view(images, noise.fork(keys, i), sigma) for i in range(guard.views)]

    def mirrored() -> list[Tensor]:
        half = [noise.noisy_view(images, noise.fork(keys, i), sigma) for i in range(guard.views // 2)]
        return half + [2 * images - view for view in half]

    def answers(views: list[Tensor]) -> Tensor:
        anchor = functional.anchor(torch.stack([clf.encoder.encode_views(view) for view in views], 1))
        return clf.logits(functional.extrapolate(plain, anchor, guard.alpha)).argmax(-1)

    found = {"before": answers(independent()), "after": answers(mirrored())}
    spent = turns(args, {"before": independent, "after": mirrored}, images=len(images))
    finish(
        args,
        idea="antithetic views",
        what=" ".join((__doc__ or "").split()),
        **spent,
        accuracy_effect={
            "attacked_photos": len(images),
            "undefended": (clf(images).argmax(-1) == right).float().mean().item(),
            **{name: (labels == right).float().mean().item() for name, labels in found.items()},
            "same_answer": (found["before"] == found["after"]).float().mean().item(),
        },
        kept=False,
        why="drawing is what it halves, and drawing is a small part of a pass; the anchor would no longer be the "
        "paper's mean of independent views",
    )


if __name__ == "__main__":
    main()
