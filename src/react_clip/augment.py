r"""Changes of images: the weak stochastic augmentation :math:`\mathcal T(x)` behind J, motions, filters, JPEG.

T(x) is a mild affine always; then Gaussian blur, additive noise and colour jitter, each with probability one half.
Magnitudes and probability are those of the released codes of SS-TPT and MAC, the order is the paper's. Parameters come
from one stream per image, so an image's augmentation does not depend on its batch. Every step is differentiable in x.

Those codes use torchvision. Different here: shifts are not rounded to whole pixels; the border fades into black once,
there twice; brightness, contrast, saturation and hue change in this order, there in a random one; and hue turns in
YIQ, which is smooth, instead of HSV.
"""

from __future__ import annotations

import io
import math
from functools import cache
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from react_clip import noise
from react_clip.config import Configuration, Count, Fraction, Range
from react_clip.errors import ReactClipError

_LUMA = (0.299, 0.587, 0.114)
_RGB_TO_YIQ = [[0.299, 0.587, 0.114], [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]]


class Motion(Configuration):
    """Ranges of a small rotation, shift and zoom about the centre; every value is drawn per image.

    >>> views = Motion()(torch.rand(2, 3, 32, 32), torch.tensor([1, 2]))
    >>> views.shape, bool(views.min() >= 0), bool(views.max() <= 1)
    (torch.Size([2, 3, 32, 32]), True, True)
    """

    rotation: float = 5.0
    """Largest angle, in degrees."""
    translation: float = 0.04
    """Largest shift, as a share of the side."""
    scale: Range = (0.92, 1.08)
    """Smallest and largest zoom."""

    def __call__(self, images: Tensor, keys: Tensor) -> Tensor:
        """One moved view per image ``[B, 3, H, W]`` in [0, 1]; its random numbers follow from its key ``[B]``."""
        return self._move(images, noise.uniform(keys, 4).to(images.dtype))

    def _move(self, images: Tensor, draw: Tensor) -> Tensor:
        """Images moved by random numbers ``[B, 4]`` in [0, 1); black comes in from outside."""
        turns = noise.tabulated(_turns, draw[:, 0], self.rotation)
        zoom = self.scale[0] + (self.scale[1] - self.scale[0]) * draw[:, 3]
        # Coordinates run from -1 to 1, so a share of the side counts twice.
        shift = 2.0 * self.translation * (2.0 * draw[:, 1:3] - 1.0)
        return affine(images, turns / zoom[:, None, None], shift)


class WeakAugmentation(Motion):
    """Ranges of T(x): a motion, then blur, noise and colour jitter; every value is drawn per image.

    >>> keys = torch.tensor([1, 2])
    >>> views = WeakAugmentation()(torch.rand(2, 3, 32, 32), keys)
    >>> views.shape, bool(views.min() >= 0), bool(views.max() <= 1)
    (torch.Size([2, 3, 32, 32]), True, True)
    """

    probability: Fraction = 0.5
    """Chance of each of blur, noise and jitter."""
    blur_kernel: Count = 5
    """Side of the blur's kernel in pixels, odd."""
    blur_sigma: Range = (0.5, 1.2)
    """Smallest and largest standard deviation of the blur, in pixels."""
    noise_sigma: float = 0.02
    """Largest scale of the additive noise."""
    jitter: float = 0.08
    """Largest relative change of brightness, contrast and saturation."""
    hue: float = 0.02
    """Largest change of hue, as a share of the colour circle."""

    def __post_init__(self) -> None:
        if self.blur_kernel % 2 == 0:
            raise ReactClipError(f"blur_kernel is {self.blur_kernel}; it must be odd, such as 5")

    _jitter_first: ClassVar[bool] = False

    def __call__(self, images: Tensor, keys: Tensor, shared: Tensor | None = None) -> Tensor:
        """One augmented view per image ``[B, 3, H, W]`` in [0, 1]; its random numbers follow from its key ``[B]``.

        With ``shared`` keys ``[B]``, everything but the noise follows from them: where they are equal, views are moved,
        blurred and jittered alike.
        """
        parameters, grain = noise.fork(keys, torch.arange(2, device=keys.device)[:, None])
        draw = noise.uniform(parameters if shared is None else noise.fork(shared, 0), 13)
        blurred, noisy, jittered = (draw[:, 4:7] < self.probability).unbind(1)
        draw = draw.to(images.dtype)
        view = self._move(images, draw[:, 0:4])
        if self._jitter_first:
            view = torch.where(_per_image(jittered), self._jitter(view, draw[:, 9:13]), view)
        kernels = noise.tabulated(_gaussians, draw[:, 7], *self.blur_sigma, self.blur_kernel)
        blurry = filtered(filtered(view, kernels[:, None, :]), kernels[:, :, None])
        view = torch.where(_per_image(blurred), blurry, view)
        # A view without noise has noise of scale zero.
        view = noise.noisy_view(view, grain, self.noise_sigma * draw[:, 8] * noisy).clamp(0.0, 1.0)
        if self._jitter_first:
            return view
        return torch.where(_per_image(jittered), self._jitter(view, draw[:, 9:13]), view)

    def _jitter(self, images: Tensor, draw: Tensor) -> Tensor:
        """Images with other brightness, contrast, saturation and hue."""
        factors = 1.0 + self.jitter * (2.0 * draw[:, :3] - 1.0)
        brightness, contrast, saturation = map(_per_image, factors.unbind(1))
        view = (images * brightness).clamp(0.0, 1.0)
        view = torch.lerp(_gray(view).mean(dim=(2, 3), keepdim=True), view, contrast).clamp(0.0, 1.0)
        view = torch.lerp(_gray(view), view, saturation).clamp(0.0, 1.0)
        turns = noise.tabulated(_hue_matrices, draw[:, 3], self.hue)
        return torch.einsum("bij,bjhw->bihw", turns, view).clamp(0.0, 1.0)


class JitterFirst(WeakAugmentation):
    """The same with colour jitter before blur and noise, as in the released codes of MAC and SS-TPT."""

    _jitter_first = True


def smaller_copy(images: Tensor, size: int) -> Tensor:
    """Square images resized to ``[B, 3, size, size]``, bilinear with antialiasing; those of that size stay as they are.

    Two products with weights that are computed once differ between devices by 1e-6; PyTorch's kernels by 1e-5.
    """
    if images.shape[-1] == size:
        return images
    weights = resizing_weights(images.shape[-1], size, "bilinear", images.device, images.dtype)
    return weights @ images @ weights.T


@cache
def resizing_weights(old: int, new: int, mode: str, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Weights ``[new, old]`` that resize one side of an image or grid; bilinear ones with antialiasing.

    >>> resizing_weights(14, 10, "bicubic", torch.device("cpu"), torch.float32).sum(1).allclose(torch.ones(10))
    True
    """
    with torch.inference_mode(False), torch.no_grad():
        identity = torch.eye(old, dtype=torch.float64, device="cpu")[None, None]
        weights = F.interpolate(identity, size=(new, old), mode=mode, antialias=mode == "bilinear")
        return weights[0, 0].to(device, dtype)


def affine(images: Tensor, matrices: Tensor, shifts: Tensor, border: str = "zeros", size: int | None = None) -> Tensor:
    """Images whose pixel at (x, y) comes from ``matrix @ (x, y) + shift``, in coordinates that run from -1 to 1.

    Each image has its own matrix ``[B, 2, 2]`` and shift ``[B, 2]``; ``border`` is a padding mode of ``F.grid_sample``.
    The result is as large as the images, or has sides of ``size`` pixels.

    >>> half = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]), torch.tensor([[1.0, 0.0]])
    >>> affine(torch.tensor([[[[0.1, 0.2, 0.3, 0.4]]]]), *half)
    tensor([[[[0.3000, 0.4000, 0.0000, 0.0000]]]])
    """
    sides = (images.shape[3], images.shape[2]) if size is None else (size, size)
    x, y = (_pixel_centres(side, images.device, images.dtype) for side in sides)
    down = matrices[:, :, 1:] * y + shifts[..., None]
    places = (matrices[:, :, :1] * x)[:, :, None] + down[..., None]
    return sampled(images, places.movedim(1, 3), border)


def sampled(images: Tensor, places: Tensor, border: str, mode: str = "bilinear") -> Tensor:
    """Images at ``places`` ``[B, H, W, 2]``, (x, y) in coordinates that run from -1 to 1; clamped to [0, 1]."""
    # Rounded to less than a hundredth of a pixel: so few bits let `F.grid_sample`, whose formula depends on the device,
    # compute positions in pixels without rounding.
    steps = 2.0 ** (23 - max(images.shape[2:]).bit_length())
    grid = (places * steps).round_().mul_(1.0 / steps).to(images.dtype)
    return F.grid_sample(images, grid, mode=mode, padding_mode=border, align_corners=False).clamp(0.0, 1.0)


def _per_image(values: Tensor) -> Tensor:
    """``[B]`` as ``[B, 1, 1, 1]``, to be combined with pixels."""
    return values[:, None, None, None]


@cache
def _pixel_centres(side: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Centres of the pixels of a side that runs from -1 to 1."""
    return torch.arange(1 - side, side, 2, dtype=dtype, device="cpu").div(side).to(device)


def filtered(images: Tensor, kernels: Tensor, border: str = "reflect") -> Tensor:
    """Images, each filtered with its own kernel ``[B, k, l]`` of odd sides; ``border`` is a mode of ``F.pad``.

    >>> filtered(torch.eye(3)[None, None], torch.full((1, 1, 3), 1 / 3), "replicate")
    tensor([[[[0.6667, 0.3333, 0.0000],
              [0.3333, 0.3333, 0.3333],
              [0.0000, 0.3333, 0.6667]]]])
    """
    height, width = kernels.shape[1] // 2, kernels.shape[2] // 2
    # The batch becomes channels of a grouped convolution.
    planes = F.pad(images, (width, width, height, height), mode=border).flatten(0, 1)[None]
    weights = kernels.to(images).repeat_interleave(images.shape[1], 0)[:, None]
    return F.conv2d(planes, weights, groups=planes.shape[1]).reshape(images.shape)


def jpeg(images: Tensor, quality: int) -> Tensor:
    """Images in [0, 1] as JPEG files written and read again; no gradients.

    >>> jpeg(torch.full((1, 3, 8, 8), 0.5), quality=50).unique()
    tensor([0.5020])
    """
    read = []
    for pixels in images.detach().mul(255.0).round().byte().permute(0, 2, 3, 1).cpu().numpy():
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "JPEG", quality=quality)
        read.append(torch.from_numpy(np.array(Image.open(file))))
    # Divided on the CPU: a GPU would multiply by the reciprocal.
    return torch.stack(read).permute(0, 3, 1, 2).to(images.dtype).div(255.0).to(images.device)


def low_pass(images: Tensor, radius: float) -> Tensor:
    r"""Images with every frequency k damped by :math:`\exp(-\lVert k \rVert^2 / 2 r^2)`, clamped to [0, 1].

    k is in cycles per side, so the filter does not depend on the number of pixels.

    >>> stripes = torch.tensor([0.0, 1.0]).repeat(4).expand(1, 1, 8, 8)
    >>> low_pass(stripes, 1.0)[0, 0, 0, :2]
    tensor([0.4998, 0.5002])
    """
    height, width = (
        torch.fft.fftfreq(side, 1 / side, device=images.device, dtype=images.dtype) for side in images.shape[2:]
    )
    mask = torch.exp(-(height[:, None] ** 2 + width**2) / (2.0 * radius**2))
    damped: Tensor = torch.fft.ifft2(torch.fft.fft2(images) * mask).real
    return damped.clamp(0.0, 1.0)


def _gray(images: Tensor) -> Tensor:
    red, green, blue = images.unbind(1)
    return (_LUMA[0] * red + _LUMA[1] * green + _LUMA[2] * blue)[:, None]


# Functions of uniform numbers [P], which noise.tabulated calls.


def _turns(uniform: Tensor, most: float) -> Tensor:
    """Matrices ``[P, 2, 2]`` of rotations by up to ``most`` degrees in both directions."""
    angle = math.radians(most) * (2.0 * uniform - 1.0)
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([cos, -sin, sin, cos], 1).reshape(-1, 2, 2)


def _hue_matrices(uniform: Tensor, most: float) -> Tensor:
    """RGB matrices ``[P, 3, 3]`` that rotate the chroma plane of YIQ by up to ``most`` of a circle in both directions.

    It is the hue change of HSV if small, but smooth.
    """
    to_yiq = torch.tensor(_RGB_TO_YIQ, dtype=uniform.dtype)
    turns = torch.eye(3, dtype=uniform.dtype).repeat(len(uniform), 1, 1)
    turns[:, 1:, 1:] = _turns(uniform, 360.0 * most)
    turned: Tensor = torch.linalg.inv(to_yiq) @ turns @ to_yiq
    return turned


def _gaussians(uniform: Tensor, low: float, high: float, length: int) -> Tensor:
    """Gaussian kernels ``[P, length]`` of sum 1 with standard deviations from ``low`` to ``high``."""
    offsets = torch.arange(length, dtype=uniform.dtype) - length // 2
    return torch.softmax(-(offsets**2) / (2.0 * (low + (high - low) * uniform[:, None]) ** 2), dim=1)
