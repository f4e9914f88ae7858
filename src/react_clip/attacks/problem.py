"""What every attack works on: checked images, their budgets and streams, and a model that counts its own calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from react_clip import noise
from react_clip.attacks.losses import Loss, margin
from react_clip.errors import ReactClipError

Model = Callable[[Tensor], Tensor]
"""Any map from ``[B, C, H, W]`` pixels in [0, 1] to ``[B, K]`` logits."""

Progress = Callable[[int, int], None]
"""Called as ``progress(done_steps, total_steps)``."""


@dataclass
class Steps:
    """Steps done so far, told to whoever watches."""

    total: int
    watcher: Progress | None = None
    done: int = 0

    def tick(self) -> None:
        """One more step is done."""
        self._tell(self.done + 1)

    def finish(self) -> None:
        """Jump to the end: steps that were planned but not needed count as done."""
        if self.done < self.total:
            self._tell(self.total)

    def _tell(self, done: int) -> None:
        self.done = done
        if self.watcher is not None:
            self.watcher(done, self.total)


@dataclass(frozen=True)
class Problem:
    """Images to break, each with its label, budget and random stream.

    A subset made by :meth:`take` sees the same streams and counts into the same ``queries``, so an attack may drop
    images at any time without changing what happens to the others.
    """

    model: Model
    x: Tensor
    y: Tensor
    eps: Tensor  # [n, 1, 1, 1]
    keys: Tensor
    rows: Tensor  # where these images sit in the caller's batch
    queries: Tensor  # [B], for the caller's whole batch; shared by all subsets
    steps: Steps

    def __len__(self) -> int:
        return len(self.x)

    def take(self, rows: Tensor) -> Problem:
        """The problem restricted to some of its images."""
        return replace(
            self, x=self.x[rows], y=self.y[rows], eps=self.eps[rows], keys=self.keys[rows], rows=self.rows[rows]
        )

    def fork(self, branch: int) -> Problem:
        """The same problem on another branch of the random streams."""
        return replace(self, keys=noise.fork(self.keys, branch))

    def uniform(self, count: int) -> Tensor:
        """``[n, count]`` numbers uniform in [0, 1), from each image's own stream."""
        return noise.uniform(self.keys, count)

    def random_start(self) -> Tensor:
        """A point drawn uniformly from the ball, then clamped to the image range."""
        unit = self.uniform(self.x[0].numel()).reshape(self.x.shape)
        return self.project(self.x + self.eps * (2.0 * unit - 1.0))

    def project(self, images: Tensor) -> Tensor:
        r"""Nearest point with :math:`\lVert x' - x \rVert_\infty \le \epsilon` and pixels in [0, 1].

        The two bounds are rounded once each, hence exact to 1 ulp of the larger pixel, and exactly x when eps is 0.
        """
        low, high = (self.x - self.eps).clamp(0.0, 1.0), (self.x + self.eps).clamp(0.0, 1.0)
        return images.clamp(low, high)

    def logits(self, images: Tensor) -> Tensor:
        """One counted forward pass, without gradients."""
        with torch.no_grad():
            return self._forward(images)

    def gradient(self, images: Tensor, loss: Loss, eot: int = 1) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, loss per image and the gradient of the summed loss, each averaged over ``eot`` passes."""
        logits, value, slope = self._one_gradient(images, loss)
        for _ in range(eot - 1):
            again = self._one_gradient(images, loss)
            logits, value, slope = logits + again[0], value + again[1], slope + again[2]
        return logits / eot, value / eot, slope / eot

    def _one_gradient(self, images: Tensor, loss: Loss) -> tuple[Tensor, Tensor, Tensor]:
        with torch.enable_grad():
            pixels = images.detach().requires_grad_()
            logits = self._forward(pixels)
            value = loss(logits, self.y)
            slope = torch.autograd.grad(value.sum(), pixels, allow_unused=True)[0] if value.requires_grad else None
            if slope is None:
                raise ReactClipError(
                    "the model's logits carry no gradient to the pixels, which this attack needs; "
                    "remove the no_grad or detach inside the model, or use attacks.Square, which needs none"
                )
        if not bool(slope.isfinite().all()):
            raise ReactClipError(
                "the model's gradient holds NaN or infinite values; run the model in float32, or use attacks.Square"
            )
        return logits.detach(), value.detach(), slope

    def _forward(self, images: Tensor) -> Tensor:
        logits = self.model(images)
        self.queries[self.rows] += 1
        check_logits(logits, self.y)
        return logits if logits.dtype == torch.float64 else logits.float()


@dataclass(frozen=True)
class Found:
    """Candidate images and what the model said about them."""

    images: Tensor
    logits: Tensor

    def broken(self, y: Tensor) -> Tensor:
        """Whether the model's answer differs from the label; a tie goes to argmax's choice, not to the attacker."""
        return self.logits.argmax(dim=1) != y

    def where(self, better: Tensor, other: Found) -> Found:
        """The other's images where ``better``, these elsewhere."""
        return Found(
            torch.where(better[:, None, None, None], other.images, self.images),
            torch.where(better[:, None], other.logits, self.logits),
        )

    def put(self, rows: Tensor, other: Found) -> Found:
        """These images with the given rows replaced."""
        return Found(self.images.index_copy(0, rows, other.images), self.logits.index_copy(0, rows, other.logits))


Attempt = Callable[[Problem, Tensor], Found]
"""One try at some images of a problem; the second argument says which rows of it they are."""


def relay(problem: Problem, clean: Tensor, attempts: Sequence[Attempt]) -> Found:
    """Run the attempts in turn, each only on images that still stand, on its own branch of the streams.

    An image that the model already gets wrong is returned as it is. One that survives everything comes back as the
    candidate with the largest margin.
    """
    kept = Found(problem.x, clean)
    for number, attempt in enumerate(attempts):
        rows = (~kept.broken(problem.y)).nonzero().squeeze(1)
        if len(rows) == 0:
            break
        part = problem.take(rows)
        found, before = attempt(part.fork(number), rows), Found(kept.images[rows], kept.logits[rows])
        better = found.broken(part.y) | (margin(found.logits, part.y) > margin(before.logits, part.y))
        kept = kept.put(rows, before.where(better, found))
    return kept


def check_images(x: Tensor) -> None:
    """Refuse anything but ``[B, C, H, W]`` floats in [0, 1]."""
    if not isinstance(x, Tensor) or x.ndim != 4:
        got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise ReactClipError(f"images have {got}, but an attack takes [batch, channels, height, width]")
    if not x.is_floating_point():
        raise ReactClipError(f"images are {x.dtype}, but an attack takes floats in [0, 1]; divide bytes by 255")
    if x.numel() == 0:
        return
    if bool(x.isnan().any()):
        raise ReactClipError(
            "images hold NaN pixels, but an attack takes floats in [0, 1]; look at how they were loaded"
        )
    low, high = x.min().item(), x.max().item()
    if low < 0.0 or high > 1.0:
        raise ReactClipError(
            f"pixels lie in [{low:.4g}, {high:.4g}], but an attack takes [0, 1]; divide bytes by 255, "
            "and leave mean/std normalisation to the model"
        )


def check_labels(y: Tensor, count: int) -> None:
    """Refuse anything but ``[B]`` non-negative integers."""
    if not isinstance(y, Tensor) or y.shape != (count,):
        got = f"shape {tuple(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
        raise ReactClipError(f"labels have {got}, but {count} images need shape ({count},): one class index each")
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise ReactClipError(f"labels are {y.dtype}, but class indices are integers; use labels.long()")
    if count and int(y.min()) < 0:
        raise ReactClipError(f"a label is {int(y.min())}, but class indices start at 0; drop images without a label")


def check_logits(logits: Tensor, y: Tensor) -> None:
    """Refuse a model that answers with anything but finite ``[n, K]`` logits that cover the labels."""
    if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != len(y):
        got = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise ReactClipError(f"the model answered {len(y)} images with {got}, but an attack needs logits [{len(y)}, K]")
    classes = logits.shape[1]
    if classes < 2:
        raise ReactClipError(
            f"the model has {classes} class, but an attack needs at least 2; add a class to confuse it with"
        )
    if int(y.max()) >= classes:
        raise ReactClipError(f"a label is {int(y.max())}, but the model has {classes} classes (0 to {classes - 1})")
    if not bool(logits.isfinite().all()):
        raise ReactClipError(
            "the model's logits hold NaN or infinite values; run the model in float32 and check its weights"
        )


def check_size(name: str, value: float, positive: bool = False) -> None:
    """Refuse a length in pixel values outside [0, 1]: the classic 8 instead of 8/255."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ReactClipError(f"{name} is {value!r}, but it must be a number from 0 to 1, such as 4/255")
    if value > 1:
        raise ReactClipError(f"{name} is {value:g}, but pixels lie in [0, 1], so the limit is 1; write {value:g}/255")
    if value < 0 or (positive and value == 0):
        limit = "above 0" if positive else "0 or more"
        raise ReactClipError(f"{name} is {value:g}, but it must be {limit}; write for example 4/255")


def budgets(eps: Tensor | float, x: Tensor) -> Tensor:
    """One checked budget per image, ``[B, 1, 1, 1]``, from a number or a ``[B]`` tensor."""
    if not isinstance(eps, Tensor):
        check_size("eps", eps)
        return torch.full((len(x), 1, 1, 1), float(eps), device=x.device)
    if eps.ndim != 0 and eps.shape != (len(x),):
        raise ReactClipError(
            f"eps has shape {tuple(eps.shape)}, but {len(x)} images need one number or shape ({len(x)},)"
        )
    values = eps.detach().to(x.device, torch.float32).expand(len(x))
    for extreme in (values.min(), values.max()) if len(values) else ():
        check_size("eps", float(extreme))
    return values.reshape(-1, 1, 1, 1).clone()
