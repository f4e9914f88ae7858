r"""SecondLook: our own defence, which compares the image with a smaller copy and corrects it where they differ.

f is the feature of the image, c that of its small copy, and m that of a still smaller copy of the image moved a little
(the moved copy). An attack is made for the image as it is, so its effect is smaller in both copies; a photo keeps its
feature in them.

1. Encode the image and the small copy. If :math:`\lVert c - f \rVert < t` and both have the same best class, answer f.
2. Otherwise encode the moved copy.
3. If :math:`\lVert c - f \rVert \ge t`, the image counts as attacked: answer
   :math:`f + \alpha\,(\tfrac12 (c + m) - f)`.
4. Otherwise answer :math:`f + \beta\,(\tfrac12 (c + m) - f)`, which undoes attacks that stop right behind the boundary
   between two classes.

Most clean photos end at step 1, after one pass and a small copy that costs two thirds of one. Without classes there is
no best class: the distance decides alone.

Its closest relatives are CSR (:mod:`react_clip.defenses.csr`), whose gate is the distance to a low-pass copy, and AGC
(:mod:`react_clip.defenses.agc`), which moves the feature through the mean of views.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

import torch
from pydantic import Field
from torch import Tensor

from react_clip.augment import Motion, smaller_copy
from react_clip.config import NonNegative
from react_clip.defenses.base import Defense
from react_clip.defenses.view import View
from react_clip.encoders import OPENAI_VIT_B_16, Encoder
from react_clip.errors import ReactClipError
from react_clip.functional import drift, extrapolate
from react_clip.preprocess import Images
from react_clip.zeroshot import ZeroShotClassifier

if TYPE_CHECKING:
    from react_clip.calibration import Calibration

Size = Annotated[float, Field(gt=0, lt=1)]

COPY, MOVED_COPY = range(2)
"""Branches of an image's random stream: motion of the copy (where it is not smaller), motion of the moved copy."""

BRANCHES = ("keep", "blend", "correct")
"""Names of the branches: steps 1, 4 and 3."""
KEEP, BLEND, CORRECT = range(3)


@dataclass(frozen=True)
class MovedCopy:
    """Copies of ``size`` pixels a side of moved images."""

    motion: Motion
    size: int

    def __call__(self, images: Tensor, keys: Tensor) -> Tensor:
        """Images ``[B, 3, S, S]`` and their random streams ``[B]`` to ``[B, 3, size, size]``."""
        return smaller_copy(self.motion(images, keys), self.size)


LEAST_PATCHES = 4
"""Fewest patches on a side of the small copy."""


class SecondLook(Defense):
    """Compare the image with a smaller copy of itself, and correct it where they differ.

    The threshold is that of OpenAI's ViT-B/16; :meth:`calibrate` finds that of another encoder, or of your photos.
    Diagnostics: ``drift`` and ``score`` are the distance between the features of image and copy, ``instability`` is J
    between their predictions (which decides nothing), ``disagrees`` is true where their best classes differ, and
    ``branch`` indexes :data:`BRANCHES`.

    >>> guard = SecondLook(threshold=0.45)
    >>> guard.alpha, guard.blend
    (2.0, 1.0)
    >>> SecondLook.from_dict(guard.to_dict()) == guard
    True
    """

    kind = "second_look"
    colour = "#332288"
    at_once = True
    renamed: ClassVar[Mapping[str, str]] = {"look": "copy_size", "moved_look": "moved_copy_size"}

    copy_size: Size | None = 176 / 224
    """Side of the small copy as a fraction of the image's, rounded to whole patches. ``None`` compares with moved views
    of full size, as do encoders that take one size only in any case."""
    moved_copy_size: Size = 160 / 224
    """The same for the moved copy; the size of the small copy where the encoder cannot take it."""
    threshold: Annotated[float, Field(ge=0, le=2)] = 0.4795
    """t, the distance between the features of image and copy from which an image counts as attacked."""
    motion: Motion = field(default_factory=Motion)
    """Motion of the image before the moved copy."""
    alpha: NonNegative = 2.0
    """Strength of the correction of attacked images."""
    blend: NonNegative = 1.0
    """beta, the strength of the correction where only the best classes differ; 1 gives the mean of both copies."""

    def defend(self, x: View) -> tuple[Tensor, dict[str, Tensor]]:
        """Steps 1 to 4."""
        size, moved_size = self.sizes(x.encoder)
        full_size = x.drawn(self.motion, COPY)
        moved_copy = x.drawn(MovedCopy(self.motion, moved_size), MOVED_COPY, recordable=True)
        copy = full_size if size == x.encoder.image_size else x.smaller(size)
        f, c = x.encode_together(x.image, copy, soon=moved_copy)
        distance = drift(f, c)
        disagrees = x.best(f) != x.best(c)
        attacked = x.gate(distance, self.threshold)
        m = x.encode(moved_copy, where=attacked | disagrees)
        mean = (c + m) / 2
        closed = torch.where(disagrees[:, None], extrapolate(f, mean, self.blend), f)
        features = torch.where(attacked[:, None], extrapolate(f, mean, self.alpha), closed)
        branch = torch.where(attacked, CORRECT, disagrees.long())  # KEEP and BLEND are 0 and 1
        measured = {"drift": distance, "score": distance, "instability": x.instability(f, c)}
        return features, measured | {"disagrees": disagrees, "branch": branch}

    def check(self, encoder: Encoder) -> None:
        """Raise if a copy is not smaller than the image, or has too few patches."""
        self.sizes(encoder)

    def sizes(self, encoder: Encoder) -> tuple[int, int]:
        """Sides of the small and of the moved copy in pixels: that of the image where copies have full size."""
        size = None if self.copy_size is None else _whole_patches(encoder, self.copy_size)
        if size is None:
            return encoder.image_size, encoder.image_size
        return size, _whole_patches(encoder, self.moved_copy_size) or size

    @classmethod
    def for_encoder(cls, encoder: Encoder | str) -> Self:
        """The configuration we ship for an encoder.

        >>> SecondLook.for_encoder("clip-vit-b-16") == SecondLook()
        True
        """
        name = (encoder if isinstance(encoder, str) else encoder.weights).partition("@")[0]
        if name not in OPENAI_VIT_B_16:
            raise ReactClipError(
                f"there is no threshold of SecondLook for {name!r}: every encoder has its own; measure it on "
                "some hundred clean photos: --calibrate-on PHOTOS, or rc.SecondLook.calibrate(clip, photos).config"
            )
        return cls()

    @classmethod
    def calibrate(cls, clip: ZeroShotClassifier | Encoder, photos: Images, clean_pass: float = 0.97) -> Calibration:
        """The threshold from clean photos of your own, without labels and without an attack.

        Its ``config`` is the defence; see :func:`react_clip.calibration.calibrate_threshold`.
        """
        from react_clip.calibration import calibrate_threshold

        encoder = clip.encoder if isinstance(clip, ZeroShotClassifier) else clip
        return calibrate_threshold(encoder, photos, base=cls(), clean_pass=clean_pass)


def _whole_patches(encoder: Encoder, fraction: float) -> int | None:
    """Size of a copy in pixels, or ``None`` if the encoder cannot take it; raises if it has too few or all patches."""
    size = encoder.size_near(fraction)
    if size is None:
        return None
    patch = encoder.patch_size or size
    if size >= encoder.image_size or size < LEAST_PATCHES * patch:
        sides = f"{size // patch} of the {encoder.image_size // patch} patches a side of {encoder.name!r}"
        raise ReactClipError(
            f"a copy of {fraction:.3g} of the side has {sides}; it needs at least {LEAST_PATCHES} and fewer than the "
            "image: change it, or compare with moved views of full size with copy_size=None"
        )
    return size
