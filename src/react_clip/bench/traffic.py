"""What the contenders answer: photos repeated to the number asked for, a share of them attacked."""

from __future__ import annotations

import torch
from torch import Tensor

from react_clip.attacks import Attack
from react_clip.defenses import ReACT
from react_clip.errors import ReactClipError
from react_clip.zeroshot import ZeroShotClassifier


def synthetic_photos(count: int, size: int, *, seed: int = 0) -> Tensor:
    """Coloured blotches ``[count, 3, size, size]`` in [0, 1]: for speed, what is on a photo does not matter."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, 3, 8, 8, generator=generator)
    return torch.nn.functional.interpolate(coarse, size=(size, size), mode="bilinear").clamp(0.0, 1.0)


def attacked_places(count: int, share: float) -> Tensor:
    """Which of ``count`` images are attacked: spread evenly, as in traffic, so that every batch has its share.

    >>> attacked_places(10, 0.2), attacked_places(10, 0.0)
    (tensor([0, 5]), tensor([], dtype=torch.int64))
    """
    attacked = round(share * count)
    return torch.arange(attacked) * count // max(attacked, 1)


class Traffic:
    """Images for every number and share that is asked for; photos are attacked when they are first needed, and once.

    Without an attack (random weights know none) the images stay clean whatever the share.
    """

    def __init__(
        self, clf: ZeroShotClassifier, photos: Tensor, attack: Attack | None, *, batch: int, seed: int = 0
    ) -> None:
        self._clf, self._attack, self._batch, self._seed = clf, attack, batch, seed
        self._photos = photos.to(clf.device)
        self._attacked = self._photos.clone()
        self._done = torch.zeros(len(photos), dtype=torch.bool)

    def images(self, count: int, share: float) -> Tensor:
        """``count`` images, this share of them attacked."""
        chosen = torch.arange(count) % len(self._photos)
        images = self._photos[chosen.to(self._photos.device)]
        if self._attack is None:
            return images
        places = attacked_places(count, share)
        self._prepare(self._attack, chosen[places])
        where = places.to(images.device)
        return images.index_copy(0, where, self._attacked[chosen[places].to(images.device)])

    def _prepare(self, attack: Attack, photos: Tensor) -> None:
        missing = torch.tensor(sorted(set(photos[~self._done[photos]].tolist())), dtype=torch.long)
        for part in torch.split(missing, self._batch) if len(missing) else ():
            clean = self._photos[part.to(self._photos.device)]
            with torch.no_grad():
                answers = self._clf(clean).argmax(-1)
            self._attacked[part.to(self._photos.device)] = attack(self._clf, clean, answers, seed=self._seed).images
            self._done[part] = True


@torch.no_grad()
def gate_scores(clf: ZeroShotClassifier, guard: ReACT, images: Tensor, *, batch: int) -> Tensor:
    """The score of every image, on the host; views of the anchor do not enter it."""
    eager = guard.replace(lazy=False, views=1, max_batch=batch)
    scores = torch.cat([eager(clf, part, seed=0).score for part in torch.split(images, batch)]).double().cpu()
    if not bool(torch.isfinite(scores).all()):
        raise ReactClipError("these weights give scores that are not finite; use another precision")
    return scores


def opening(guard: ReACT, scores: Tensor, share: float) -> ReACT:
    """The defence with the threshold at which its gate opens for this share of the scores.

    What stands in for attacks where weights are random: an attack on them, and their drift under noise, mean nothing.

    >>> opening(ReACT(), torch.tensor([1.0, 4.0, 2.0, 3.0]), 0.5).tau
    2.5
    """
    ordered, opened = scores.sort(descending=True).values, round(share * len(scores))
    # Halfway between the last score that opens and the first that does not, so that rounding moves neither.
    bounds = torch.cat([ordered[:1] + 1.0, ordered, ordered[-1:] - 1.0])
    return guard.replace(tau=float(bounds[opened : opened + 2].mean()))
