"""Photos that nobody attacked but that were taken or stored badly: noise, blur, fog, bad light, few pixels, text."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from react_clip import augment, noise
from react_clip.attacks.base import Attack
from react_clip.attacks.problem import Problem
from react_clip.attacks.typographic import write_other_names
from react_clip.errors import ReactClipError
from react_clip.preprocess import from_levels

_LARGEST = {"shot": 1000.0, "fog": 1.0, "pixelate": 1.0, "text": 1.0}
"""Largest severity of some types; 100 for the others."""


class Corruption(Attack):
    """Damage every image in the same natural way and round it to 8 bits; the labels and the model play no part.

    ``severity`` depends on the type:

    - ``noise``: standard deviation of Gaussian noise, for pixels in [0, 1];
    - ``shot``: photons that a white pixel collects (Poisson noise; fewer are worse);
    - ``jpeg``: quality of the file, 1 to 100;
    - ``blur``, ``defocus``: standard deviation of a Gaussian, radius of a disk, in pixels;
    - ``motion``: length in pixels of a straight movement in a random direction;
    - ``contrast``, ``brightness``: factor (1 changes nothing);
    - ``fog``: largest fraction of the light that comes from an uneven white haze;
    - ``pixelate``: fraction of the side that is left before the image is enlarged again;
    - ``text``: height of the name of another class, written on the image, as a fraction of the image's.

    It has no budget (``eps`` is 0), and an evaluation applies it to all images, also to those that CLIP gets wrong.

    >>> x, y = torch.full((1, 3, 8, 8), 0.5), torch.tensor([0])
    >>> dark = Corruption(type="brightness", severity=0.4)
    >>> dark.name, dark(lambda x: x.mean((2, 3)), x, y).images.unique()
    ('brightness-0.4', tensor([0.2000]))
    """

    kind: ClassVar[str] = "corruption"
    natural: ClassVar[bool] = True
    type: Literal[
        "noise", "shot", "jpeg", "blur", "defocus", "motion", "contrast", "brightness", "fog", "pixelate", "text"
    ] = "noise"
    severity: Annotated[float, Field(gt=0)] = 0.02
    """``noise``: sigma; ``shot``: photons; ``jpeg``: quality; ``blur``, ``defocus``, ``motion``: pixels; ``contrast``,
    ``brightness``: factor; ``fog``, ``pixelate``, ``text``: fraction."""
    eps: Literal[0] = 0
    """Damage has no budget."""

    def __post_init__(self) -> None:
        most = _LARGEST.get(self.type, 100.0)
        if self.severity > most:
            raise ReactClipError(f"severity is {self.severity:g}; for {self.type} it must be at most {most:g}")

    @property
    def name(self) -> str:
        """``noise-0.02``."""
        return f"{self.type}-{self.severity:g}"

    def search(self, problem: Problem) -> Tensor:
        """The damaged images."""
        with torch.no_grad():
            return from_levels(self._damaged(problem).clamp(0.0, 1.0).mul(255.0).round())

    def _damaged(self, problem: Problem) -> Tensor:
        x, keys, severity = problem.x, problem.keys, self.severity
        if self.type == "text":
            if (names := getattr(problem.target, "names", None)) is None:
                raise ReactClipError("text writes the name of another class; give a ZeroShotClassifier, which has some")
            return write_other_names(x, problem.y, names, keys, severity)
        if self.type == "noise":
            return noise.noisy_view(x, keys, torch.full_like(x[:, 0, 0, 0], severity))
        if self.type == "shot":
            return _shot_noise(x, keys, severity)
        if self.type == "jpeg":
            return augment.jpeg(x, int(severity))
        if self.type == "defocus":
            return augment.filtered(x, _disk(severity).expand(len(x), -1, -1), "replicate")
        if self.type == "motion":
            directions = math.pi * noise.uniform(keys, 1).flatten()
            lines = torch.stack([_line(severity, float(direction)) for direction in directions])
            return augment.filtered(x, lines, "replicate")
        if self.type == "fog":
            # Haze of at least half of the severity everywhere, smooth over a seventh of the side.
            coarse = 0.5 + 0.5 * noise.uniform(keys, 49).to(x.dtype).reshape(-1, 1, 7, 7)
            haze = severity * F.interpolate(coarse, x.shape[2:], mode="bicubic").clamp(0.5, 1.0)
            return x * (1.0 - haze) + haze
        if self.type == "brightness":
            return x * severity
        if self.type == "contrast":
            grey = x.mean((1, 2, 3), keepdim=True)
            return grey + severity * (x - grey)
        if self.type == "pixelate":
            side = max(1, round(severity * x.shape[3]))
            return F.interpolate(F.interpolate(x, (side, side), mode="area"), x.shape[2:])
        return augment.filtered(x, _gaussian(severity).expand(len(x), -1, -1), "replicate")


def _shot_noise(x: Tensor, keys: Tensor, photons: float) -> Tensor:
    """Images of counted photons: each pixel has a Poisson distribution with mean ``x * photons``."""
    counted = [
        np.random.default_rng(int(key) % 2**64).poisson(pixels.double().cpu().numpy() * photons)
        for pixels, key in zip(x, keys, strict=True)
    ]
    return torch.from_numpy(np.stack(counted) / photons).to(x)


def _gaussian(sigma: float) -> Tensor:
    """A Gaussian of sum 1, cut off at three standard deviations."""
    at = torch.arange(-math.ceil(3 * sigma), math.ceil(3 * sigma) + 1.0)
    line = torch.exp(-0.5 * (at / sigma) ** 2)
    return torch.outer(line, line) / line.sum() ** 2


def _disk(radius: float) -> Tensor:
    """A disk of sum 1, with a soft edge of one pixel."""
    reach = math.ceil(radius)
    at = torch.arange(-reach, reach + 1.0)
    weights = (radius + 0.5 - torch.hypot(at[:, None], at[None])).clamp(0.0, 1.0)
    return weights / weights.sum()


def _line(length: float, direction: float) -> Tensor:
    """A line of sum 1 through the centre, ``direction`` in radians, with a soft edge of one pixel."""
    reach = math.ceil(length / 2)
    at = torch.arange(-reach, reach + 1.0)
    along = (at[None] * math.cos(direction) + at[:, None] * math.sin(direction)).abs()
    across = (at[None] * math.sin(direction) - at[:, None] * math.cos(direction)).abs()
    weights = (1.0 - across).clamp(0.0, 1.0) * (length / 2 + 0.5 - along).clamp(0.0, 1.0)
    return weights / weights.sum()
