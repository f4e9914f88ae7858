r"""The weak stochastic augmentation :math:`\mathcal T(x)` behind the prediction-instability score.

A mild affine always; then Gaussian blur, additive noise and colour jitter, each with probability one half. Magnitudes
are those of the closely related SS-TPT and MAC; the probability is not published and is a field. Parameters come from
one stream per image, so an image's augmentation does not depend on its batch. Every step is differentiable in x.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from react_clip import functional, fusing, noise
from react_clip.config import Configuration, Count, Range, Share
from react_clip.errors import ReactClipError
from react_clip.fusing import fused
from react_clip.graphs import Graphs

_LUMA = (0.299, 0.587, 0.114)
_RGB_TO_YIQ = torch.tensor([[0.299, 0.587, 0.114], [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]])
_YIQ_TO_RGB = torch.linalg.inv(_RGB_TO_YIQ)


class WeakAugmentation(Configuration):
    """Ranges of T(x); every value is drawn per image.

    >>> keys = torch.tensor([1, 2])
    >>> views = WeakAugmentation()(torch.rand(2, 3, 32, 32), keys)
    >>> views.shape, bool(views.min() >= 0), bool(views.max() <= 1)
    (torch.Size([2, 3, 32, 32]), True, True)
    """

    rotation: float = 5.0
    """Largest angle, in degrees."""
    translation: float = 0.04
    """Largest shift, as a share of the side."""
    scale: Range = (0.92, 1.08)
    probability: Share = 0.5
    """Chance of each of blur, noise and jitter."""
    blur_kernel: Count = 5
    blur_sigma: Range = (0.5, 1.2)
    noise_sigma: float = 0.02
    """Largest scale of the additive noise."""
    jitter: float = 0.08
    """Largest relative change of brightness, contrast and saturation."""
    hue: float = 0.02
    """Largest change of hue, as a share of the colour circle."""

    def __post_init__(self) -> None:
        if self.blur_kernel % 2 == 0:
            raise ReactClipError(f"blur_kernel is {self.blur_kernel}; it must be odd, such as 5")

    def __call__(self, images: Tensor, keys: Tensor) -> Tensor:
        """One augmented view per image ``[B, 3, H, W]`` in [0, 1], drawn from the image's stream."""
        return self.choose(keys, images.dtype)(images)

    def choose(self, keys: Tensor, dtype: torch.dtype) -> Choices:
        """What becomes of the images with these keys, before anyone has seen them."""
        lots, grain = noise.fork(keys, torch.arange(2, device=keys.device)[:, None])
        draw = noise.uniform(lots, 13)
        chosen = (draw[:, 4:7] < self.probability).to(dtype)
        draw = draw.to(dtype)
        parts = (
            self._motion(draw[:, 0:4]),
            chosen[:, 0:1],
            # No noise is noise of scale zero: one pass over the pixels less than a choice between two views.
            self.noise_sigma * draw[:, 8:9] * chosen[:, 1:2],
            chosen[:, 2:3],
            1.0 + self.jitter * (2.0 * draw[:, 9:12] - 1.0),
            _hue_matrices(2.0 * math.pi * self.hue * (2.0 * draw[:, 12] - 1.0)).flatten(1),
            self._kernels(draw[:, 7]),
        )
        return Choices(torch.cat(parts, 1), grain)

    def _motion(self, draw: Tensor) -> Tensor:
        angle = math.radians(self.rotation) * (2.0 * draw[:, :1] - 1.0)
        # grid_sample's coordinates run from -1 to 1, so a share of the side counts twice.
        shift = 2.0 * self.translation * (2.0 * draw[:, 1:3] - 1.0)
        zoom = self.scale[0] + (self.scale[1] - self.scale[0]) * draw[:, 3:4]
        return torch.cat([angle.cos() / zoom, angle.sin() / zoom, shift], 1)

    def _kernels(self, draw: Tensor) -> Tensor:
        low, high = self.blur_sigma
        half = self.blur_kernel // 2
        offsets = torch.arange(-half, half + 1, device=draw.device, dtype=draw.dtype)
        return torch.softmax(-(offsets**2) / (2.0 * (low + (high - low) * draw[:, None]) ** 2), dim=1)


@dataclass(frozen=True, eq=False)
class Choices(functional.PerImage):
    """What T does to each of some images, one row an image; called on the images, it does so."""

    values: Tensor
    """All numbers behind each other, so that to pick some images is one operation."""
    grain: Tensor
    """The stream of the additive noise."""

    @property
    def motion(self) -> Tensor:
        """Cosine and sine of the turn, both over the zoom, and the shift across and along: ``[B, 4]``."""
        return self.values[:, 0:4]

    @property
    def blurred(self) -> Tensor:
        """Whether an image is."""
        return self.values[:, 4] > 0

    @property
    def sigma(self) -> Tensor:
        """Scale of the additive noise."""
        return self.values[:, 5]

    @property
    def jittered(self) -> Tensor:
        """Whether the colours of an image are."""
        return self.values[:, 6] > 0

    @property
    def factors(self) -> Tensor:
        """Of brightness, contrast and saturation: ``[B, 3]``."""
        return self.values[:, 7:10]

    @property
    def turns(self) -> Tensor:
        """Of the colours, ``[B, 3, 3]``."""
        return self.values[:, 10:19].reshape(-1, 3, 3)

    @property
    def kernels(self) -> Tensor:
        """Of the blur, ``[B, K]``."""
        return self.values[:, 19:]

    def __call__(self, images: Tensor, rows: Tensor | None = None, *, recorded: bool = False) -> Tensor:
        """One augmented view per image, or per row that is asked for; ``recorded``: few of them by a CUDA graph."""
        tensors, count = (images, self.values, self.grain), None if rows is None else len(rows)
        if recorded and (graphs := _GRAPHS[fusing.pays(tensors, count)]).suit(*tensors, count=count):
            return graphs(*tensors, rows=rows)[0]
        return _augmented(*(tensors if rows is None else (tensor[rows] for tensor in tensors)))[0]


def _augmented(images: Tensor, values: Tensor, grain: Tensor) -> tuple[Tensor]:
    """T(x) as a function of tensors, as a graph needs it."""
    chosen = Choices(values, grain)
    view = _blurred(_moved(images, chosen.motion), chosen.kernels, chosen.blurred)
    view = noise.noisy_view(view, grain, chosen.sigma)
    return (_jittered(view, chosen.factors, chosen.turns, chosen.jittered),)


_GRAPHS = {fused_too: Graphs(_augmented) for fused_too in (False, True)}
"""By whether the functions in it run as one kernel each, which a graph cannot change its mind about."""


def _moved(images: Tensor, motion: Tensor) -> Tensor:
    """Images turned, shifted and scaled; black comes in from outside."""
    cos, sin, right, down = motion[:, :, None].unbind(1)
    x, y = (_centres(side, images)[None] for side in (images.shape[3], images.shape[2]))
    # Where each pixel comes from: cos x - sin y + right across, sin x + cos y + down along.
    across = (cos * x)[:, None, :] + (right - sin * y)[:, :, None]
    along = (sin * x)[:, None, :] + (cos * y + down)[:, :, None]
    grid = torch.stack([across, along], 3)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False).clamp(0.0, 1.0)


def _centres(side: int, like: Tensor) -> Tensor:
    """The centres of the pixels of a side that runs from -1 to 1."""
    return (2.0 * torch.arange(side, device=like.device, dtype=like.dtype) + 1.0) / side - 1.0


def _total(parts: Iterable[Tensor]) -> Tensor:
    return reduce(torch.add, parts)


def _column(values: Tensor) -> Tensor:
    """One value per image, to be combined with its pixels."""
    return values[:, None, None, None]


# ---------------------------------------------------------------------- blur


def _blurred_number(images: Tensor, kernels: Tensor, chosen: Tensor) -> Tensor:
    """:func:`_blurred` number by number: neighbours are close in memory, so to read them anew costs little."""
    half = kernels.shape[1] // 2
    taps = [_column(tap) for tap in kernels.unbind(1)]
    height, width = images.shape[2:]
    wide = F.pad(images, (half, half, 0, 0), mode="reflect")
    across = _total(tap * wide[..., i : i + width] for i, tap in enumerate(taps))
    tall = F.pad(across, (0, 0, half, half), mode="reflect")
    along = _total(tap * tall[:, :, i : i + height] for i, tap in enumerate(taps))
    return torch.where(_column(chosen), along, images)


@fused(_blurred_number)
def _blurred(images: Tensor, kernels: Tensor, chosen: Tensor) -> Tensor:
    """The chosen images, each blurred with its own kernel ``[B, K]``, one axis after the other."""
    batch, channels, height, width = images.shape
    half = kernels.shape[1] // 2
    # The batch becomes channels of a grouped convolution.
    weight = kernels.repeat_interleave(channels, 0)[:, None, None, :]
    stacked = images.reshape(1, batch * channels, height, width)
    stacked = F.conv2d(F.pad(stacked, (half, half, 0, 0), mode="reflect"), weight, groups=batch * channels)
    stacked = F.pad(stacked, (0, 0, half, half), mode="reflect")
    stacked = F.conv2d(stacked, weight.transpose(2, 3), groups=batch * channels)
    return torch.where(_column(chosen), stacked.reshape(images.shape), images)


# ---------------------------------------------------------------------- colour


def _jittered_number(images: Tensor, factors: Tensor, turns: Tensor, chosen: Tensor) -> Tensor:
    """:func:`_jittered` number by number: a colour is three products and two sums."""
    images = images.clamp(0.0, 1.0)
    channels = _toned(images, factors).unbind(1)
    mixed = [
        _total(weight[:, None, None] * channel for weight, channel in zip(row.unbind(1), channels, strict=True))
        for row in turns.unbind(1)
    ]
    return torch.where(_column(chosen), torch.stack(mixed, 1).clamp(0.0, 1.0), images)


@fused(_jittered_number)
def _jittered(images: Tensor, factors: Tensor, turns: Tensor, chosen: Tensor) -> Tensor:
    """Images held to [0, 1]; the chosen ones with other tones (``[B, 3]``) and every colour times their matrix."""
    images = images.clamp(0.0, 1.0)
    recoloured = torch.einsum("bij,bjhw->bihw", turns, _toned(images, factors))
    return torch.where(_column(chosen), recoloured.clamp(0.0, 1.0), images)


def _toned(images: Tensor, factors: Tensor) -> Tensor:
    """Images with other brightness, contrast and saturation."""
    brightness, contrast, saturation = map(_column, factors.unbind(1))
    view = (images * brightness).clamp(0.0, 1.0)
    view = torch.lerp(_gray(view).mean(dim=(2, 3), keepdim=True), view, contrast).clamp(0.0, 1.0)
    return torch.lerp(_gray(view), view, saturation).clamp(0.0, 1.0)


def _gray(images: Tensor) -> Tensor:
    red, green, blue = images.unbind(1)
    return (_LUMA[0] * red + _LUMA[1] * green + _LUMA[2] * blue)[:, None]


@cache
def _colour_matrices(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """From YIQ to RGB and back, sent to a device once."""
    # Whoever asks first may be in inference mode; whoever asks later may need gradients.
    with torch.inference_mode(False):
        return _YIQ_TO_RGB.to(device, dtype), _RGB_TO_YIQ.to(device, dtype)


def _hue_matrices(angle: Tensor) -> Tensor:
    """What turns the chroma plane of YIQ, ``[B, 3, 3]``: the same small change of hue as through HSV, but smooth."""
    cos, sin = angle.cos(), angle.sin()
    one, zero = torch.ones_like(cos), torch.zeros_like(cos)
    turn = torch.stack([one, zero, zero, zero, cos, -sin, zero, sin, cos], 1).reshape(-1, 3, 3)
    back, forth = _colour_matrices(angle.device, angle.dtype)
    return back @ turn @ forth
