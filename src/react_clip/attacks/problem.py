"""The input of an attack: checked images, their budgets and random streams, and a count of the passes spent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from react_clip import linf, noise
from react_clip.attacks.losses import Loss, margin
from react_clip.attacks.targets import Passes, Target
from react_clip.defenses.base import DefendedModule
from react_clip.errors import ReactClipError

Progress = Callable[[int, int], None]
"""Called as ``progress(done_steps, total_steps)``."""


@dataclass
class Steps:
    """Counts the steps done and reports each to ``progress``."""

    total: int
    progress: Progress | None = None
    done: int = 0

    def tick(self, count: int = 1) -> None:
        """Count a step, or several; none is reported if there are none."""
        self.done += count
        if self.progress is not None and count:
            self.progress(self.done, self.total)


@dataclass(frozen=True, eq=False)
class Problem:
    """Images to attack, each with its label, budget and random stream.

    A subset made by :meth:`take` has the same streams and counts into the same ``spent``, so an attack may drop images
    at any time without changing what happens to the others.
    """

    target: Target
    module: DefendedModule | None
    """The classifier behind its defence, for attacks that know the defence."""
    ball: linf.Ball
    y: Tensor
    keys: Tensor
    """Random streams ``[n]``."""
    rows: Tensor
    """Positions ``[n]`` of these images in the caller's batch."""
    spent: Tensor
    """Forward and backward passes ``[2, B]`` of the caller's whole batch; shared by all subsets."""
    steps: Steps

    @property
    def defended(self) -> DefendedModule:
        """The classifier behind its defence; only attacks that know the defence may ask for it."""
        assert self.module is not None
        return self.module

    @property
    def x(self) -> Tensor:
        """The images ``[n, C, H, W]`` before the attack."""
        return self.ball.centre

    def take(self, rows: Tensor) -> Problem:
        """The problem restricted to some of its images."""
        return replace(self, ball=self.ball.take(rows), y=self.y[rows], keys=self.keys[rows], rows=self.rows[rows])

    def fork(self, branch: int) -> Problem:
        """The same problem on another branch of the random streams."""
        return replace(self, keys=noise.fork(self.keys, branch))

    def on(self, target: Target, seed: noise.Seed) -> Problem:
        """The same images with another target and the random streams of another seed."""
        return replace(self, target=target, keys=noise.stream_keys(self.x, seed))

    def random_start(self) -> Tensor:
        """Images drawn uniformly from the balls."""
        return self.ball.random_start(self.keys)

    def step_size(self, size: float | str) -> Tensor | float:
        """A configured step size; ``"eps/4"`` is a quarter of each image's budget."""
        return self.ball.eps / 4 if isinstance(size, str) else size

    def spend(self, passes: Passes) -> None:
        """Count encoder passes for each of these images."""
        self.spent[:, self.rows] += torch.tensor(passes, device=self.spent.device)[:, None]

    def logits(self, images: Tensor) -> Tensor:
        """One counted answer of the target, without gradients."""
        self.spend(self.target.answer_passes)
        with torch.no_grad():
            return _checked(self.target.answer(images), self.y)

    def candidates(self, images: Tensor) -> Candidates:
        """Images with the target's answers on them."""
        return Candidates.judged(images, self.logits(images), self.y)

    def gradient(self, images: Tensor, loss: Loss, eot: int = 1) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, loss per image and the gradient of the summed loss, each averaged over ``eot`` passes."""
        logits, value, slope = self._one_gradient(images, loss)
        for _ in range(eot - 1):
            again = self._one_gradient(images, loss)
            logits, value, slope = logits + again[0], value + again[1], slope + again[2]
        return logits / eot, value / eot, slope / eot

    def _one_gradient(self, images: Tensor, loss: Loss) -> tuple[Tensor, Tensor, Tensor]:
        self.spend(self.target.gradient_passes)
        with torch.enable_grad():
            pixels = images.detach().requires_grad_()
            logits = _checked(self.target.differentiable(pixels), self.y)
            value = loss(logits, self.y)
            slope = checked_gradient(linf.slope(value, pixels), "attacks.Square")
        return logits.detach(), value.detach(), slope


@dataclass(frozen=True, eq=False)
class Candidates:
    """One image per row and how the target answers it."""

    images: Tensor
    wrong: Tensor
    """Share ``[n]`` of the answers that are wrong; a tie is decided by argmax."""
    loss: Tensor
    """Which of two candidates is better if both are wrong equally often; the larger the better."""

    @classmethod
    def none(cls, images: Tensor) -> Candidates:
        """Candidates worse than any other."""
        return cls(images, *torch.full((2, len(images)), -torch.inf, device=images.device))

    @classmethod
    def judged(cls, images: Tensor, logits: Tensor, labels: Tensor) -> Candidates:
        """Candidates with one answer each; the loss is the margin."""
        return cls(images, (logits.argmax(1) != labels).float(), margin(logits, labels))

    def or_better(self, other: Candidates) -> Candidates:
        """Per image the other candidate if it is wrong more often or, if equally often, has the larger loss."""
        better = (other.wrong > self.wrong) | ((other.wrong == self.wrong) & (other.loss > self.loss))
        return Candidates(*select(better, vars(other).values(), vars(self).values()))

    def take(self, rows: Tensor) -> Candidates:
        """Some of the rows."""
        return Candidates(*(values[rows] for values in vars(self).values()))

    def put(self, rows: Tensor, other: Candidates) -> Candidates:
        """These candidates with the given rows replaced."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Candidates(*(mine.index_copy(0, rows, new) for mine, new in pairs))


def select(mask: Tensor, yes: Iterable[Tensor], no: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """``torch.where`` for several tensors with one row per image; ``mask`` is ``[n]``."""
    return tuple(torch.where(mask.reshape(-1, *[1] * (a.ndim - 1)), a, b) for a, b in zip(yes, no, strict=True))


Attempt = Callable[[Problem, Tensor], Candidates]
"""One attack on some images of a problem; the second argument is which rows of it they are."""


def relay(problem: Problem, best: Candidates, attempts: Sequence[Attempt], *, spare_broken: bool = True) -> Candidates:
    """Run the attempts in turn on their own branches of the random streams; returns the best candidates of each image.

    With ``spare_broken`` an attempt gets only images that are not wrong in every answer so far.
    """
    for number, attempt in enumerate(attempts):
        rows = (best.wrong < (1.0 if spare_broken else torch.inf)).nonzero().squeeze(1)
        if len(rows):
            candidates = attempt(problem.take(rows).fork(number), rows)
            best = best.put(rows, best.take(rows).or_better(candidates))
    return best


# ---------------------------------------------------------------------- checks


def check_images(x: Tensor) -> None:
    """Refuse anything but ``[B, C, H, W]`` floats in [0, 1]."""
    if not isinstance(x, Tensor) or x.ndim != 4:
        raise ReactClipError(f"images have {_shape(x)}, but an attack takes [batch, channels, height, width]")
    if not x.is_floating_point():
        raise ReactClipError(f"images are {x.dtype}, but an attack takes floats in [0, 1]; divide bytes by 255")
    if x.numel() == 0:
        return
    low, high = x.min().item(), x.max().item()
    if not (low >= 0.0 and high <= 1.0):  # true for NaN as well
        raise ReactClipError(
            f"pixels lie in [{low:.4g}, {high:.4g}], but an attack takes [0, 1]; divide bytes by 255, "
            "and leave mean/std normalisation to the model"
        )


def check_labels(y: Tensor, count: int) -> None:
    """Refuse anything but ``[B]`` non-negative integers."""
    if not isinstance(y, Tensor) or y.shape != (count,):
        raise ReactClipError(f"labels have {_shape(y)}, but {count} images need shape ({count},): one class index each")
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise ReactClipError(f"labels are {y.dtype}, but class indices are integers; use labels.long()")
    if count and int(y.min()) < 0:
        raise ReactClipError(f"a label is {int(y.min())}, but class indices start at 0; drop images without a label")


def budgets(eps: Tensor | float, x: Tensor) -> Tensor:
    """One checked budget per image, ``[B, 1, 1, 1]``, from a number or a ``[B]`` tensor."""
    if not isinstance(eps, Tensor | int | float):
        raise ReactClipError(f"eps is {eps!r}, but it must be a number from 0 to 1, such as 4/255")
    values = eps.detach() if isinstance(eps, Tensor) else torch.tensor(float(eps))
    if values.ndim != 0 and values.shape != (len(x),):
        raise ReactClipError(
            f"eps has shape {tuple(values.shape)}, but {len(x)} images need one number or shape ({len(x)},)"
        )
    values = values.to(x.device, torch.float32).expand(len(x))
    for value in values[~((values >= 0) & (values <= 1))].tolist():
        way_out = f"write {value:g}/255" if value > 1 else "write for example 4/255"
        raise ReactClipError(f"eps is {value:g}, but pixels lie in [0, 1], so it must be from 0 to 1; {way_out}")
    return values.reshape(-1, 1, 1, 1).clone()


def checked_gradient(slope: Tensor | None, way_out: str) -> Tensor:
    """The gradient, refused if it is missing or not finite; ``way_out`` names an attack that needs none."""
    if slope is None:
        raise ReactClipError(
            "the target's logits carry no gradient to the pixels, which this attack needs; remove the no_grad or "
            f"detach inside the model, or use {way_out}, which needs none"
        )
    if not bool(slope.isfinite().all()):
        raise ReactClipError(
            f"the target's gradient holds NaN or infinite values; run the model in float32, or use {way_out}"
        )
    return slope


def _checked(logits: Tensor, y: Tensor) -> Tensor:
    """The logits as floats, refused unless they are finite, ``[n, K]``, and cover the labels."""
    if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != len(y):
        raise ReactClipError(
            f"the model answered {len(y)} images with {_shape(logits)}, but an attack needs logits [{len(y)}, K]"
        )
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
    return logits if logits.dtype == torch.float64 else logits.float()


def _shape(value: object) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
