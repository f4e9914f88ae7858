"""The base class of defences."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from react_clip.config import Registered, Registry
from react_clip.defenses.base import Defended
from react_clip.encoders.base import Encoder
from react_clip.noise import Seed
from react_clip.preprocess import Images
from react_clip.zeroshot import ZeroShotClassifier


class BaseDefense(Registered, ABC):
    """A defence with a ``kind`` that recipes and tables call it by; see :mod:`react_clip.config`.

    A class of another package becomes known by an entry point in the group ``react_clip.defenses``, or is written as
    ``module:Class``.
    """

    registry: ClassVar[Registry[BaseDefense]] = Registry("defence", "react_clip.defenses")

    @abstractmethod
    def __call__(self, clf: ZeroShotClassifier, images: Images, seed: Seed = 0) -> Defended:
        """Defended answers for pixels in [0, 1], PIL images, paths or bytes; see :class:`Defended`."""

    @abstractmethod
    def cost(self) -> tuple[int, int]:
        """Most forward and backward encoder passes that one image can need."""

    def check(self, encoder: Encoder) -> None:
        """Raise if this defence cannot run on an encoder; most defences run on all."""
