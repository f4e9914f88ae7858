"""A batch of images whose views are encoded: in parts of bounded memory, with counted passes and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from react_clip import linf, noise
from react_clip.encoders.base import Encoder
from react_clip.errors import ReactClipError

VIEWS = 256
"""Most views made for one encoder call, if it has several images: bounds the memory. Images alone may be twice that."""
VIEWS_WITH_GRADIENTS = 64
"""The same where the encoder keeps activations for a backward pass."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class Gradients:
    """Gradients through a defence, for an attacker who differentiates it; answers do not depend on these options."""

    checkpoint: bool = False
    """Recompute encoder activations in the backward pass instead of keeping them: one call bounds the memory."""
    instability_temperature: float = 1.0
    """The gradient of J is that of logits divided by this: at CLIP's own scale it vanishes where an answer is clear."""


PLAIN_GRADIENTS = Gradients()


def unchanged(images: Tensor) -> Tensor:
    """The images themselves."""
    return images


@dataclass(frozen=True)
class Copies:
    """Views of each image that can be encoded: ``make(images, *values)`` makes one per row.

    With ``stream`` or ``numbers`` they are drawn at random: ``make(images, keys, *values)``.
    """

    make: Callable[..., Tensor]
    stream: int | None = None
    """Branch of an image's random stream; ``None`` for the stream itself."""
    numbers: range | None = None
    """Numbers of the views, each with a branch of that stream; ``None`` for a single view on the stream itself."""
    count: int = 1
    """Views that ``make`` returns for each row, one after the other."""
    recordable: bool = False
    """True if equal copies make equal views without waiting for the GPU: few views become one CUDA graph."""
    values: tuple[Tensor, ...] = field(default=(), compare=False)
    """Tensors that ``make`` takes beside the images, each with one row per image ``[B, ...]``."""

    @property
    def drawn(self) -> bool:
        """True if ``make`` needs random streams."""
        return self.stream is not None or self.numbers is not None

    @property
    def single(self) -> bool:
        """True for one view of each image."""
        return self.numbers is None and self.count == 1

    @property
    def total(self) -> int:
        """Views of one image."""
        return self.count * (1 if self.numbers is None else len(self.numbers))

    def views(self, images: Tensor, keys: Tensor | None, values: Sequence[Tensor]) -> Tensor:
        """Views ``[n * count, 3, s, s]`` of images ``[n, 3, S, S]``: those of the first image, then of the second."""
        if keys is None or not self.drawn:
            return self.make(images, *values)
        keys = keys if self.stream is None else noise.fork(keys, self.stream)
        if self.numbers is not None:
            numbers = torch.arange(self.numbers.start, self.numbers.stop, device=keys.device)
            keys = noise.fork(keys[:, None], numbers).flatten()
            images, *values = (each.repeat_interleave(len(self.numbers), 0) for each in (images, *values))
        return self.make(images, keys, *values)


@dataclass(frozen=True)
class MakeAndEncode:
    """Features of views as a function of images ``[n, 3, S, S]``, their random streams ``[n]`` and values ``[n, ...]``.

    Each of the copies, here without values, takes ``counts`` of these. Without random streams there is no tensor for
    them.
    """

    encoder: Encoder
    copies: tuple[Copies, ...]
    counts: tuple[int, ...]

    def __call__(self, images: Tensor, *others: Tensor) -> list[Tensor]:
        """For each of the copies unit features ``[n * count, D]``."""
        rest = iter(others)
        keys = next(rest) if any(each.drawn for each in self.copies) else None
        pairs = zip(self.copies, self.counts, strict=True)
        views = [each.views(images, keys, list(islice(rest, count))) for each, count in pairs]
        # Those of one size are joined.
        sizes: dict[int, list[Tensor]] = {}
        for each in views:
            sizes.setdefault(each.shape[-1], []).append(each)
        groups = [torch.cat(group) if len(group) > 1 else group[0] for group in sizes.values()]
        joined = zip(sizes, self.encoder.encode_several(groups), strict=True)
        features = {size: iter(torch.split(each, list(map(len, sizes[size])))) for size, each in joined}
        return [next(features[each.shape[-1]]) for each in views]


class Batch:
    """Images, their random streams, and the encoder.

    Args:
        encoder: the image encoder.
        pixels: ``[B, 3, S, S]`` in [0, 1], on the encoder's device.
        keys: a seed, or the random stream of each image ``[B]`` (:func:`react_clip.noise.stream_keys`).
        how: gradients, where the pixels require them.
        replay: what :attr:`recorded` of an earlier run holds; features of the same views are taken over from it.
    """

    def __init__(
        self,
        encoder: Encoder,
        pixels: Tensor,
        keys: Tensor | noise.Seed,
        how: Gradients = PLAIN_GRADIENTS,
        replay: Sequence[Any] | None = None,
    ) -> None:
        self.encoder, self.how = encoder, how
        with torch.inference_mode(False):  # defences take gradients and count in place, which inference mode forbids
            self.pixels = pixels.clone() if pixels.is_inference() else pixels
            self.passes, self.backward_passes = torch.zeros(2, len(pixels), device=pixels.device)
        self.recorded: list[Any] = []
        self._keys = keys
        self._replay = None if replay is None else list(replay)

    def __len__(self) -> int:
        return len(self.pixels)

    @cached_property
    def streams(self) -> Tensor:
        """The random stream of each image ``[B]``."""
        return self._keys if isinstance(self._keys, Tensor) else noise.stream_keys(self.pixels, self._keys)

    def keys(self, stream: int) -> Tensor:
        """A branch of the random stream of each image ``[B]``."""
        return noise.fork(self.streams, stream)

    def features(self, copies: tuple[Copies, ...], rows: Tensor | None = None) -> list[Tensor]:
        """Unit features of views of all images, or of those with these numbers ``[n]``."""
        values = tuple(value for each in copies for value in each.values)
        return self._once(values, lambda: self._encode(copies, values, rows))

    def raw(self, images: Tensor) -> Tensor:
        """Features ``[B, D]`` of given images before they are scaled to unit length; without gradients."""
        self.passes += 1
        with torch.no_grad():
            parts = torch.split(images.detach(), VIEWS)
            return self._once((images,), lambda: torch.cat([self.encoder.raw(part) for part in parts]))

    def gradient(self, objective: Callable[[Tensor], Tensor], at: Tensor) -> tuple[Tensor, Tensor]:
        """Raw features of images ``[B, D]``, and the gradient ``[B, 3, S, S]`` of an objective in their pixels.

        ``objective`` maps raw features ``[B, D]`` to values ``[B]``; a value may depend on its own row alone. One
        forward and one backward pass.
        """
        self.passes += 1
        self.backward_passes += 1
        return self._once((at,), lambda: self._gradient(objective, at.detach()))

    def _gradient(self, objective: Callable[[Tensor], Tensor], at: Tensor) -> tuple[Tensor, Tensor]:
        parts = []
        for start in range(0, len(at), VIEWS_WITH_GRADIENTS):
            with torch.enable_grad():
                pixels = at[start : start + VIEWS_WITH_GRADIENTS].requires_grad_()
                raw = self.encoder.raw(pixels)
                stop = start + len(raw)
                # The objective sees all rows; those of other parts are zero here, and their values are left out.
                values = objective(F.pad(raw, (0, 0, start, len(at) - stop)))[start:stop]
                gradient = linf.gradient(values, pixels)
            if gradient is None:
                raise ReactClipError(
                    f"features of {self.encoder.name!r} carry no gradient to the pixels, which this defence needs; use "
                    "an encoder that runs in torch, or a defence without gradients such as SecondLook"
                )
            parts.append((raw.detach(), gradient))
        features, gradients = zip(*parts, strict=True)
        return torch.cat(features), torch.cat(gradients)

    def _once(self, given: tuple[Tensor, ...], compute: Callable[[], Result]) -> Result:
        """The result of ``compute``, or that of the earlier run at this place if it was computed from the same."""
        before, known = self._replay.pop(0) if self._replay else ((), None)
        same = known is not None and len(before) == len(given) and all(map(torch.equal, before, given))
        result = cast("Result", known) if same else compute()
        if self._replay is not None:
            self.recorded.append((given, result))
        return result

    def _encode(self, copies: tuple[Copies, ...], values: tuple[Tensor, ...], rows: Tensor | None) -> list[Tensor]:
        changes = tuple(replace(each, values=()) for each in copies)
        function = MakeAndEncode(self.encoder, changes, tuple(len(each.values) for each in copies))
        tensors = [self.pixels, *([self.streams] if any(each.drawn for each in copies) else []), *values]
        limit = VIEWS_WITH_GRADIENTS if torch.is_grad_enabled() else VIEWS
        # Without gradients only views that are made take memory.
        made = sum(each.total for each in copies if each.make is not unchanged or torch.is_grad_enabled())
        step = max(1, limit // made) if made else 2 * limit
        total = len(self) if rows is None else len(rows)
        parts = []
        with self.encoder.counting() as count:
            for start in range(0, total, step):
                part = slice(start, start + step)
                parts.append(self._part(function, [each[part if rows is None else rows[part]] for each in tensors]))
        self.passes[slice(None) if rows is None else rows] += count.forward / total
        features = [torch.cat(each) if len(each) > 1 else each[0] for each in zip(*parts, strict=True)]
        numbered = [each.reshape(total, -1, each.shape[-1]) for each in features]
        return [feature[:, 0] if each.single else feature for feature, each in zip(numbered, copies, strict=True)]

    def _part(self, function: MakeAndEncode, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        if self.how.checkpoint and torch.is_grad_enabled():
            # Noise follows from keys, so views that are made again have the same bits.
            options: Any = {"use_reentrant": False, "preserve_rng_state": False}
            return cast("Sequence[Tensor]", checkpoint(function, *tensors, **options))
        if all(each.recordable for each in function.copies):
            return self.encoder.record(function, tensors)
        return function(*tensors)


def straight_through(values: Tensor, source: Tensor) -> Tensor:
    r"""``values`` with the gradient of ``source`` (BPDA with the identity).

    .. math:: z = v, \qquad \partial z := \partial s

    >>> source = torch.tensor([1.0], requires_grad=True)
    >>> answer = straight_through(torch.tensor([5.0]), 3.0 * source)
    >>> answer.detach(), torch.autograd.grad(answer, source)[0]
    (tensor([5.]), tensor([3.]))
    """
    return values.detach() + (source - source.detach())
