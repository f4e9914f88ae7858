r"""SecondLook: our own defence, which looks at small copies of the image and changes only answers that clearly differ.

f is the feature of the image, c that of its small copy, and n that of the small copy with noise. An attack is made for
the image as it is, so its effect is smaller in both copies; a photo keeps its feature in them.

1. Encode the image and both copies, and go from the image through the copies and beyond:
   :math:`e = f + \alpha\,(\tfrac12 (c + n) - f)`, scaled to unit length.
2. a and b are the best classes of f and of e, and w the unit features of the classes. Measure how far e lies beyond the
   boundary between both: :math:`lead = (\cos(e, w_b) - \cos(e, w_a)) / \lVert w_b - w_a \rVert`, or 0 where a is b.
3. Answer e where :math:`lead + k\,\lVert c - f \rVert \ge t`, and f otherwise.

The lead is a distance between features, so that one threshold fits every vocabulary. Without classes there is none:
answer e where :math:`\lVert c - f \rVert` reaches a threshold of its own.

Its closest relatives are CSR (:mod:`react_clip.defenses.csr`), whose gate is the distance to a low-pass copy, and AGC
(:mod:`react_clip.defenses.agc`), which moves the feature through the mean of views.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

import torch
from pydantic import Field
from torch import Tensor

from react_clip import noise as randomness
from react_clip.augment import Motion, smaller_copy
from react_clip.config import NonNegative
from react_clip.defenses.base import CalibratedDefense
from react_clip.defenses.view import View
from react_clip.encoders import OPENAI_VIT_B_16, Encoder
from react_clip.errors import ReactClipError
from react_clip.functional import drift, extrapolate
from react_clip.preprocess import Images
from react_clip.zeroshot import ZeroShotClassifier

if TYPE_CHECKING:
    from react_clip.calibration import Calibration

Size = Annotated[float, Field(gt=0, lt=1)]

COPY, GRAIN = range(2)
"""Branches: of an image's random stream that of its copies, and of this one that of the noise."""

LEAST_PATCHES = 4
"""Fewest patches on a side of a small copy."""

_OLDER = {"look", "moved_look", "moved_copy_size", "blend"}
"""Fields of the older rule, which compared one copy and took a second one for some images."""


@dataclass(frozen=True)
class TwoCopies:
    """A small copy of each image, and the same with Gaussian noise of standard deviation ``sigma``."""

    size: int | None
    """Side in pixels; ``None`` for a moved view of full size."""
    motion: Motion
    sigma: float

    def __call__(self, images: Tensor, keys: Tensor) -> Tensor:
        """Images ``[B, 3, S, S]`` and their random streams ``[B]`` to ``[2 B, 3, size, size]``, copy after copy."""
        copies = self.motion(images, keys) if self.size is None else smaller_copy(images, self.size)
        sigma = torch.full_like(copies[:, 0, 0, 0], self.sigma)
        noisy = randomness.noisy_view(copies, randomness.fork(keys, GRAIN), sigma)
        return torch.stack([copies, noisy], 1).flatten(0, 1)


class SecondLook(CalibratedDefense):
    """Look at two small copies of the image, and change its answer where they clearly prefer another.

    The thresholds are those of OpenAI's ViT-B/16; :meth:`calibrate` finds those of another encoder, or of your photos.
    Diagnostics: ``drift`` is the distance between the features of image and small copy, ``lead`` how far e lies beyond
    the boundary (NaN without classes), and ``score`` what the gate compares with its threshold.

    >>> guard = SecondLook(threshold=0.4)
    >>> guard.alpha, guard.noise
    (2.5, 0.05)
    >>> SecondLook.from_dict(guard.to_dict()) == guard, SecondLook.for_encoder("clip-vit-b-16") == SecondLook()
    (True, True)
    """

    kind = "second_look"
    colour = "#332288"
    constants: ClassVar[Mapping[str, str]] = dict.fromkeys(OPENAI_VIT_B_16, "")

    copy_size: Size | None = 176 / 224
    """Side of the copies as a fraction of the image's, rounded to whole patches. ``None`` takes moved views of full
    size, as do encoders that take one size only in any case."""
    noise: NonNegative = 0.05
    """Standard deviation of the second copy's noise, for pixels in [0, 1]."""
    alpha: NonNegative = 2.5
    """How far to go from the image's feature towards the mean of the copies', which lies at 1."""
    drift_weight: NonNegative = 0.4
    """k, the weight of the distance between the features of image and small copy."""
    threshold: NonNegative | None = 0.385
    """t, the score from which the answer changes; ``None`` if it was calibrated without classes."""
    drift_threshold: Annotated[float, Field(ge=0, le=2)] = 0.56
    """The distance between the features of image and small copy from which a feature changes without classes."""
    motion: Motion = field(default_factory=Motion)
    """Motion of the copies where they are not smaller."""

    def defend(self, x: View) -> tuple[Tensor, dict[str, Tensor]]:
        """Steps 1 to 3."""
        make = TwoCopies(self.size(x.encoder), self.motion, self.noise)
        f, copies = x.encode_together(x.image, x.drawn(make, COPY, count=2, recordable=True))
        c, n = copies.unbind(1)
        e = extrapolate(f, (c + n) / 2, self.alpha)
        distance = drift(f, c)
        if x.classes is None:
            lead, score = torch.full_like(distance, torch.nan), distance
            changed = x.gate(score, self.drift_threshold)
        elif self.threshold is None:
            raise ReactClipError(
                "this SecondLook was calibrated without classes, and here are some; calibrate with classes: "
                "`react-clip calibrate PHOTOS --labels-file NAMES`, or rc.SecondLook.calibrate(classifier, photos)"
            )
        else:
            lead = x.lead(f, e)
            score = lead + self.drift_weight * distance
            changed = x.gate(score, self.threshold)
        return torch.where(changed[:, None], e, f), {"drift": distance, "lead": lead, "score": score}

    def check(self, encoder: Encoder) -> None:
        """Raise if the copies are not smaller than the image, or have too few patches."""
        self.size(encoder)

    def size(self, encoder: Encoder) -> int | None:
        """Side of the copies in pixels; ``None`` where they are moved views of full size."""
        size = None if self.copy_size is None else encoder.size_near(self.copy_size)
        if size is None:
            return None
        patch = encoder.patch_size or size
        if size >= encoder.image_size or size < LEAST_PATCHES * patch:
            sides = f"{size // patch} of the {encoder.image_size // patch} patches a side of {encoder.name!r}"
            raise ReactClipError(
                f"a copy of {self.copy_size:.3g} of the side has {sides}; it needs at least {LEAST_PATCHES} and fewer "
                "than the image: change it, or compare with moved views of full size with copy_size=None"
            )
        return size

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Also reads files of the older rule, with a warning."""
        if isinstance(data, Mapping) and _OLDER & data.keys():
            old = data.get("threshold", cls.drift_threshold)
            warnings.warn(
                f"this file is of SecondLook's older rule: its threshold, {old:g}, now decides only without classes, "
                f"with classes it is {cls.threshold:g} as for OpenAI's ViT-B/16; `react-clip calibrate` renews it",
                stacklevel=2,
            )
            kept = data.keys() & {"kind", "look", "copy_size", "motion", "lazy", "max_batch"}
            named = {"copy_size" if name == "look" else name: data[name] for name in kept}
            data = {"drift_threshold": old, **named}
        return super().from_dict(data)

    @classmethod
    def calibrate(
        cls, clip: ZeroShotClassifier | Encoder, photos: Images, clean_pass: float | None = None
    ) -> Calibration:
        """The thresholds from clean photos of your own, without their labels and without an attack.

        Its ``config`` is the defence; see :func:`react_clip.calibration.calibrate_threshold`.
        """
        from react_clip.calibration import calibrate_threshold

        return calibrate_threshold(clip, photos, base=cls(), clean_pass=clean_pass)
