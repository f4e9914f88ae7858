"""Photos that nobody attacked but that were taken or stored badly: noise, JPEG, blur, contrast and brightness."""

from __future__ import annotations

import io
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageFilter
from pydantic import Field
from torch import Tensor

from react_clip import noise
from react_clip.attacks.base import Attack
from react_clip.attacks.problem import Problem
from react_clip.attacks.targets import Passes
from react_clip.defenses.base import Defense
from react_clip.preprocess import to_image


class Corruption(Attack):
    """Damage every image in the same natural way and round it to 8 bits; the labels and the model play no part.

    ``severity`` is the standard deviation of the noise (pixels in [0, 1]), the quality of the JPEG file, the radius of
    the Gaussian blur in pixels, or the factor of contrast or brightness (1 changes nothing).

    It has no budget (``eps`` is 0), and an evaluation applies it to all images, also to those that CLIP gets wrong.

    >>> x, y = torch.full((1, 3, 8, 8), 0.5), torch.tensor([0])
    >>> dark = Corruption(type="brightness", severity=0.4)
    >>> dark.name, dark(lambda x: x.mean((2, 3)), x, y).images.unique()
    ('brightness-0.4', tensor([0.2000]))
    """

    kind: ClassVar[str] = "corruption"
    natural: ClassVar[bool] = True
    type: Literal["noise", "jpeg", "blur", "contrast", "brightness"] = "noise"
    severity: Annotated[float, Field(gt=0, le=100)] = 0.02
    eps: Literal[0] = 0

    @property
    def name(self) -> str:
        """``noise-0.02``."""
        return f"{self.type}-{self.severity:g}"

    def cost(self, defense: Defense) -> Passes:
        """One pass, which looks at the outcome."""
        del defense
        return 1, 0

    def search(self, problem: Problem) -> Tensor:
        """The damaged images."""
        if self.type == "noise":
            sigma = torch.full_like(problem.x[:, 0, 0, 0], self.severity)
            return noise.noisy_view(problem.x, problem.keys, sigma).clamp(0.0, 1.0).mul(255.0).round().div(255.0)
        damaged = [np.asarray(self._damaged(to_image(pixels))) for pixels in problem.x]
        return torch.from_numpy(np.stack(damaged)).permute(0, 3, 1, 2).div(255.0).to(problem.x)

    def _damaged(self, photo: Image.Image) -> Image.Image:
        if self.type == "jpeg":
            file = io.BytesIO()
            photo.save(file, "JPEG", quality=int(self.severity))
            return Image.open(file)
        if self.type == "blur":
            return photo.filter(ImageFilter.GaussianBlur(self.severity))
        enhance = ImageEnhance.Contrast if self.type == "contrast" else ImageEnhance.Brightness
        return enhance(photo).enhance(self.severity)
