"""What workers do with a parcel: decode it, defend it, write its part. Both engines do exactly this."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from react_clip.defenses.base import Defended, Defense
from react_clip.errors import ReactClipError
from react_clip.noise import Seed
from react_clip.optional import require
from react_clip.preprocess import crop_to_size, read_image
from react_clip.scale.parcels import Parcel, read
from react_clip.scale.parts import Parts, Tally
from react_clip.zeroshot import ZeroShotClassifier

_MEASURED = ("drift_low", "drift_high", "drift", "instability", "score", "gated", "sigma", "passes")


@dataclass(frozen=True, eq=False)
class Decoded:
    """A parcel's images in order: a key each, and pixels or an error."""

    number: int
    keys: list[str]
    errors: list[str | None]
    pixels: NDArray[np.uint8]
    """``[images without error, S, S, 3]``: eight bits a value, a quarter of what the encoder will need."""


def decode(parcel: Parcel, size: int, base: str, column: str) -> Decoded:
    """Read and decode a parcel; an image that cannot be decoded is an error in its place."""
    pixels = np.empty((parcel.count, size, size, 3), np.uint8)
    keys: list[str] = []
    errors: list[str | None] = []
    good = 0
    for key, content in read(parcel, base, column):
        keys.append(key)
        try:
            if isinstance(content, ReactClipError):
                raise content
            pixels[good] = np.asarray(crop_to_size(read_image(content), size))
        except ReactClipError as error:
            errors.append(str(error))
        else:
            errors.append(None)
            good += 1
    return Decoded(parcel.number, keys, errors, pixels[:good])


class Defender:
    """A classifier and its defence, which turn decoded parcels into parts.

    A parcel is defended in one call, so its plain and probing passes fill batches together, and so do the anchor views
    of all its images whose gate opened. No batch spans two parcels: a part holds the same bits whichever worker made
    it, in whatever order, however often the job was interrupted.
    """

    def __init__(
        self, clf: ZeroShotClassifier, guard: Defense, parts: Parts, identity: str, *, seed: Seed, top: int
    ) -> None:
        self._clf, self._guard, self._seed = clf, guard, seed
        self._parts, self._identity, self._top = parts, identity, top

    def __call__(self, decoded: Decoded) -> Tally:
        """Defend a parcel and write its part."""
        defended = None
        if len(decoded.pixels):
            defended = self._guard(self._clf, _pixels(decoded.pixels, self._clf.device), seed=self._seed)
        table = rows(decoded, defended, self._clf, self._top)
        tally = Tally(
            number=decoded.number,
            images=len(decoded.keys),
            errors=len(decoded.keys) - len(decoded.pixels),
            opened=0 if defended is None else int(defended.gated.sum()),
            passes=0 if defended is None else int(defended.passes.sum()),
        )
        self._parts.write(table, tally, self._identity)
        return tally


def _pixels(decoded: NDArray[np.uint8], device: torch.device) -> Tensor:
    """Pixels in [0, 1], the same bits as from :func:`react_clip.preprocess.to_pixels`, on which the noise depends."""
    channels_first = torch.tensor(decoded).to(device).permute(0, 3, 1, 2).contiguous()
    # By a tensor: CUDA multiplies with 1 / 255 where the divisor is a number, which rounds differently.
    return channels_first.float() / torch.tensor(255.0, device=device)


def rows(decoded: Decoded, defended: Defended | None, clf: ZeroShotClassifier, top: int) -> Any:
    """One row an image as a pyarrow table; what an image does not have, or was not measured, is null."""
    pa = require("pyarrow", "writing Parquet", extra="scale")
    good = [i for i, error in enumerate(decoded.errors) if error is None]

    def column(values: Sequence[Any], kind: Any) -> Any:
        placed: list[Any] = [None] * len(decoded.keys)
        for i, value in zip(good, values, strict=True):
            placed[i] = value
        return pa.array(placed, kind)

    columns = {"key": pa.array(decoded.keys, pa.string()), "error": pa.array(decoded.errors, pa.string())}
    features: Sequence[Any] = []
    names: list[list[str]] = []
    probs: Sequence[Any] = []
    if defended is not None:
        features = list(defended.features.float().cpu().numpy())
        best = defended.probs.topk(min(top, len(clf.names)), dim=-1)
        names = [[clf.names[k] for k in chosen] for chosen in best.indices.tolist()]
        probs = list(best.values.float().cpu().numpy())
    columns["feature"] = column(features, pa.list_(pa.float32(), clf.encoder.dim))
    columns["label"] = column([chosen[0] for chosen in names], pa.string())
    columns["labels"] = column(names, pa.list_(pa.string()))
    columns["probs"] = column(probs, pa.list_(pa.float32()))
    for name in _MEASURED:
        kind = {"gated": pa.bool_(), "passes": pa.int32()}.get(name, pa.float32())
        values = [] if defended is None else getattr(defended, name).tolist()
        columns[name] = column([None if value != value else value for value in values], kind)
    return pa.table(columns)
