"""The threshold of SecondLook from clean photos: no labels, no attack.

It is the smallest distance between image and look that a wanted share of the photos stays below. A bootstrap over the
photos gives its interval.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any, Literal

import torch
from torch import Tensor

from react_clip import noise
from react_clip.config import Configuration
from react_clip.defenses.second_look import SecondLook
from react_clip.encoders.base import Encoder
from react_clip.errors import ReactClipError
from react_clip.preprocess import ImageSource

LEAST_PHOTOS = 20
"""Fewer photos are refused."""
BEYOND = 6
"""Photos that should lie beyond the threshold: with fewer, chance decides where it is."""
RESAMPLES = 500
"""Resamples of the bootstrap."""
_SAMPLE = 500
"""Photos, spread evenly, whose distances from each other are measured."""

ALIKE = 0.15
"""Median distance between the features of two photos below which they count as all alike."""
FAR = 0.8
"""Photos count as attacked if the threshold would exceed this share of the median distance between two photos. For
clean photos of ViT-B/16 it is at 0.5 (Caltech101) to 0.7 (EuroSAT), for photos attacked at 4/255 above 1."""

Photos = Tensor | Sequence[ImageSource]
"""Pixels ``[N, 3, S, S]`` in [0, 1], or a list of paths, PIL images or bytes."""

Progress = Callable[[int, int], None]
"""Called as ``progress(done_photos, total_photos)``."""


class LookCalibration(Configuration):
    """A measured threshold; ``SecondLook.load`` reads the ``config`` of its file."""

    config: SecondLook
    clean_pass: float
    """Share of clean photos that the threshold should leave uncorrected."""
    photos: int
    interval: tuple[float, float]
    """95 % interval of the threshold."""
    median: float
    """Median distance between image and look."""
    provenance: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """Warnings, one line each."""
    calibration_version: Literal[2] = 2


def calibrate(
    encoder: Encoder,
    photos: Photos,
    *,
    base: SecondLook | None = None,
    clean_pass: float = 0.97,
    batch: int = 32,
    seed: int = 0,
    provenance: dict[str, Any] | None = None,
    progress: Progress = lambda done, total: None,
) -> LookCalibration:
    """Choose the threshold so that at least ``clean_pass`` of these clean photos stay below it.

    Args:
        encoder: the image encoder.
        photos: some hundred clean photos like those that will be defended: paths, PIL images, bytes or pixels.
        base: everything but the threshold.
        clean_pass: share of clean photos to leave uncorrected.
        batch: photos at a time.
        seed: of the bootstrap, and of the motion where the look is a moved view.
        provenance: what to write down about model and photos.
        progress: called after every batch.
    """
    if not 0 < clean_pass < 1:
        raise ReactClipError(f"clean_pass is {clean_pass}; it is a share of clean photos, such as 0.97")
    if isinstance(photos, str | bytes) or not isinstance(photos, Sequence | Tensor):
        raise ReactClipError(f"photos are of type {type(photos).__name__}; give a list of paths or images, or pixels")
    if len(photos) < LEAST_PHOTOS:
        raise ReactClipError(
            f"{len(photos)} photos are too few to calibrate on; give at least {LEAST_PHOTOS}, better 300"
        )
    base = base or SecondLook()
    drift = _measure(encoder, photos, base, clean_pass, batch, seed, progress)
    notes = _notes(len(photos), clean_pass)
    if base.look is not None and base.look_size(encoder) == encoder.image_size:
        notes += (
            f"{encoder.name!r} takes one image size only: looks are moved views of full size, 2 or 3 passes an image",
        )
    for note in notes:
        warnings.warn(note, stacklevel=2)
    return LookCalibration(
        config=base.replace(threshold=threshold_for(drift, clean_pass)),
        clean_pass=clean_pass,
        photos=len(photos),
        interval=_bootstrap(drift, clean_pass, seed),
        median=round(float(drift.median()), 4),
        provenance={"model": encoder.name, "seed": seed, **(provenance or {})},
        notes=notes,
    )


@torch.no_grad()
def _measure(
    encoder: Encoder, photos: Photos, base: SecondLook, clean_pass: float, batch: int, seed: int, progress: Progress
) -> Tensor:
    """Distances ``[N]`` between the photos and their looks; refuses photos that are all alike or look attacked."""
    # With the largest threshold no photo gets a second look.
    scorer = base.replace(threshold=2.0, max_batch=max(batch, base.max_batch))
    features, drifts = [], []
    for start in range(0, len(photos), batch):
        pixels = encoder.prepare(photos[start : start + batch])
        out = scorer.correct(encoder, pixels, noise.stream_keys(pixels, seed))
        features.append(out.plain.float().cpu())
        drifts.append(out.drift.float().cpu())
        progress(min(start + batch, len(photos)), len(photos))
    # The number of pairs grows with the square of the photos; some hundred are enough.
    sample = torch.cat(features)[:: max(1, len(photos) // _SAMPLE)]
    drift, apart = torch.cat(drifts), float(torch.pdist(sample).median())
    if apart < ALIKE:
        raise ReactClipError(
            f"the photos are all alike (the median distance of two of them is {apart:.2g}, below {ALIKE}); give photos "
            "as they will come, of different things"
        )
    threshold = threshold_for(drift, clean_pass)
    if threshold > FAR * apart:
        raise ReactClipError(
            f"the photos differ from their smaller copies as attacked ones do (the threshold would be {threshold:.3g}, "
            f"and two different photos are {apart:.3g} apart); calibrate on clean photos"
        )
    return drift


def threshold_for(scores: Tensor, clean_pass: float) -> float:
    """Smallest threshold, to four digits, with at least ``clean_pass`` of the scores below it.

    >>> threshold_for(torch.arange(100) / 100, 0.95)
    0.9401
    """
    largest_below = _largest_below(scores.float().cpu(), clean_pass)
    # One fp32 step above it, then up to four digits: casting it to fp32 can no longer round it back onto the score.
    above = float(torch.nextafter(largest_below, torch.tensor(torch.inf)))
    return math.ceil(above * 1e4) / 1e4


def _largest_below(scores: Tensor, clean_pass: float) -> Tensor:
    """The largest score that must stay below the threshold."""
    return scores.kthvalue(math.ceil(clean_pass * len(scores) - 1e-9)).values


def _bootstrap(scores: Tensor, clean_pass: float, seed: int) -> tuple[float, float]:
    """95 % interval of the threshold over resampled photos."""
    generator = torch.Generator().manual_seed(seed)
    resamples = (scores[torch.randint(len(scores), scores.shape, generator=generator)] for _ in range(RESAMPLES))
    thresholds = torch.stack([_largest_below(resample, clean_pass) for resample in resamples])
    low, high = thresholds.quantile(torch.tensor([0.025, 0.975])).tolist()
    return round(low, 4), round(high, 4)


def _notes(count: int, clean_pass: float) -> tuple[str, ...]:
    needed = math.ceil(BEYOND / (1.0 - clean_pass) - 1e-9)
    if count >= needed:
        return ()
    return (
        f"{count} photos are few for clean_pass {clean_pass:g}: {needed} or more give a steadier threshold; see its "
        "interval",
    )
