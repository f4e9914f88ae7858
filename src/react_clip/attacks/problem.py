"""The input of an attack: the model, checked images with budgets and random streams, and a count of the passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from react_clip import linf, noise
from react_clip.attacks.losses import Loss, margin
from react_clip.defenses.base import DefendedModule
from react_clip.encoders.base import Encoder
from react_clip.errors import ReactClipError
from react_clip.preprocess import check_range
from react_clip.zeroshot import ZeroShotClassifier

Model = Callable[[Tensor], Tensor]
"""From pixels ``[B, C, H, W]`` in [0, 1] to logits ``[B, K]``."""

Progress = Callable[[int], None]
"""Called as ``progress(done_steps)``."""


def encoder_of(target: Model) -> Encoder | None:
    """The encoder behind a classifier or a defended classifier; ``None`` for other models."""
    clf = target.clf if isinstance(target, DefendedModule) else target
    return clf.encoder if isinstance(clf, ZeroShotClassifier) else None


@dataclass(frozen=True, eq=False)
class Problem:
    """Images to attack, each with its label, budget and random stream; an attack of your own needs these fields.

    A subset made by :meth:`take` has the same streams and counts into the same ``spent``, so an attack may drop images
    at any time without changing what happens to the others.
    """

    target: Model
    """The model: pixels ``[n, C, H, W]`` in [0, 1] to logits ``[n, K]``, differentiable, with or without a defence. It
    may be called directly, or given to another attack library."""
    ball: linf.Ball
    """The allowed images: ``ball.project(images)`` moves any images to the nearest ones."""
    y: Tensor
    """Labels ``[n]``."""
    keys: Tensor
    """Random streams ``[n]``."""
    rows: Tensor
    """Positions ``[n]`` of these images in the caller's batch."""
    passes: Any
    """The encoder's running count, with ``forward`` and ``backward``; ``None`` for a model without an encoder."""
    spent: Tensor
    """Forward and backward passes ``[2, B]`` of each image of the caller's batch; shared by all subsets."""
    flat: Tensor
    """1 for images of the caller's batch whose first gradient was zero, 0 for others, NaN before; shared likewise."""
    progress: Progress | None = None
    done: list[int] = field(default_factory=lambda: [0])
    """Steps done so far; shared by all subsets."""
    parts: dict[str, Tensor] = field(default_factory=dict)
    """For an attack of several: whether each of them broke an image, ``[n]`` by its name; NaN where it was not run."""

    @property
    def x(self) -> Tensor:
        """The images ``[n, C, H, W]`` before the attack."""
        return self.ball.centre

    @property
    def defended(self) -> DefendedModule:
        """The target as a classifier behind a defence; only attacks that know the defence may ask for it."""
        assert isinstance(self.target, DefendedModule)
        return self.target

    def take(self, rows: Tensor) -> Problem:
        """The problem restricted to some of its images."""
        return replace(self, ball=self.ball.take(rows), y=self.y[rows], keys=self.keys[rows], rows=self.rows[rows])

    def fork(self, number: int) -> Problem:
        """The same problem with random streams of its own for every number."""
        return replace(self, keys=noise.fork(self.keys, number))

    def on(self, target: Model, seed: noise.Seed) -> Problem:
        """The same images with another target and the random streams of another seed."""
        return replace(self, target=target, keys=noise.stream_keys(self.x, seed))

    def raising(self, value: Model) -> Problem:
        """The same images and two classes, of which the second leads by ``value(images)`` ``[n]``: attacks raise it."""
        return replace(self, target=lambda images: F.pad(value(images)[:, None], (1, 0)), y=torch.zeros_like(self.y))

    def random_start(self) -> Tensor:
        """Images drawn uniformly from the balls."""
        return self.ball.random_start(self.keys)

    def tick(self) -> None:
        """Report a step."""
        self.done[0] += 1
        if self.progress is not None:
            self.progress(self.done[0])

    @contextmanager
    def counted(self, *, backward: int = 0) -> Iterator[None]:
        """The encoder's passes within this block count for these images, in equal parts.

        Without an encoder that is one answer, and ``backward`` gradients.
        """
        before = (self.passes.forward, self.passes.backward) if self.passes is not None else (0, 0)
        yield
        spent = [1.0, float(backward)]
        if self.passes is not None:
            spent = [(self.passes.forward - before[0]) / len(self.y), (self.passes.backward - before[1]) / len(self.y)]
        self.spent[:, self.rows] += torch.tensor(spent, device=self.spent.device)[:, None]

    def logits(self, images: Tensor) -> Tensor:
        """One answer of the target, without gradients."""
        with self.counted(), torch.no_grad():
            return _checked(self.target(images), self.y)

    def candidates(self, images: Tensor) -> Candidates:
        """Images with the target's answers on them."""
        return Candidates.judged(images, self.logits(images), self.y)

    def gradient(self, images: Tensor, loss: Loss, eot: int = 1) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, loss per image and the gradient of the summed loss, each averaged over ``eot`` passes."""
        draws = [self._one_gradient(images, loss) for _ in range(eot)]
        logits, value, gradient = (sum(parts[1:], parts[0]) / eot for parts in zip(*draws, strict=True))
        return logits, value, gradient

    def _one_gradient(self, images: Tensor, loss: Loss) -> tuple[Tensor, Tensor, Tensor]:
        with self.counted(backward=1), torch.enable_grad():
            pixels = images.detach().requires_grad_()
            logits = _checked(self.target(pixels), self.y)
            value = loss(logits, self.y)
            gradient = self.checked(linf.gradient(value, pixels), "attacks.Square")
        return logits.detach(), value.detach(), gradient

    def checked(self, gradient: Tensor | None, way_out: str) -> Tensor:
        """The gradient, refused if it is missing or not finite; ``way_out`` names an attack that needs none."""
        if gradient is None or not bool(gradient.isfinite().all()):
            problem = "logits carry no gradient to the pixels" if gradient is None else "gradient holds NaN"
            raise ReactClipError(
                f"the target's {problem}; remove no_grad and detach inside the model and run it in float32, or use "
                f"{way_out}, which needs no gradient"
            )
        before, zero = self.flat[self.rows], (gradient == 0).flatten(1).all(1).to(self.flat)
        self.flat[self.rows] = torch.where(before.isnan(), zero, before)
        return gradient


@dataclass(frozen=True, eq=False)
class Candidates:
    """One image per row and how the target answers it."""

    images: Tensor
    wrong: Tensor
    """Fraction ``[n]`` of the answers that are wrong; a tie is decided by argmax."""
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


def run_in_turn(
    problem: Problem, best: Candidates, attempts: Sequence[Attempt], *, spare_broken: bool = True
) -> Candidates:
    """Run the attempts one after the other, with random streams of their own; returns the best candidate of each image.

    With ``spare_broken`` an attempt gets only images that are not wrong in every answer so far.
    """
    for number, attempt in enumerate(attempts):
        rows = (best.wrong < (1.0 if spare_broken else torch.inf)).nonzero().squeeze(1)
        if len(rows):
            candidates = attempt(problem.take(rows).fork(number), rows)
            best = best.put(rows, best.take(rows).or_better(candidates))
    return best


# ---------------------------------------------------------------------- checks


def check_input(x: Tensor, y: Tensor) -> None:
    """Refuse anything but ``[B, C, H, W]`` floats in [0, 1] and ``[B]`` non-negative integers."""
    if not isinstance(x, Tensor) or x.ndim != 4 or not x.is_floating_point():
        raise ReactClipError(
            f"images have {_shape(x)}, but an attack takes floats in [0, 1] of shape [batch, channels, height, width]; "
            "divide bytes by 255"
        )
    if x.numel():
        check_range(x)
    whole = isinstance(y, Tensor) and not (y.is_floating_point() or y.is_complex() or y.dtype == torch.bool)
    if not whole or y.shape != (len(x),) or (len(y) and int(y.min()) < 0):
        given = f"{_shape(y)}: {getattr(y, 'tolist', lambda: y)()!r:.60}"
        raise ReactClipError(f"labels have {given}, but {len(x)} images need shape ({len(x)},): class indices from 0")


def budgets(eps: Tensor | float, x: Tensor, most: float = 1.0) -> Tensor:
    """One checked budget per image, ``[B, 1, 1, 1]``, from a number or a ``[B]`` tensor."""
    if not isinstance(eps, Tensor | int | float):
        raise ReactClipError(f"eps is {eps!r}, but it must be a number from 0 to {most:g}, such as 4/255")
    values = torch.as_tensor(eps, dtype=torch.float32, device=x.device)
    if values.ndim != 0 and values.shape != (len(x),):
        raise ReactClipError(f"eps has shape {tuple(values.shape)}, but {len(x)} images need one number or ({len(x)},)")
    for value in values[~((values >= 0) & (values <= most))].flatten().tolist():
        way_out = f"write {value:g}/255" if value > most else "write for example 4/255"
        raise ReactClipError(f"eps is {value:g}, but pixels lie in [0, 1], so it must be from 0 to {most:g}; {way_out}")
    return values.detach().expand(len(x)).reshape(-1, 1, 1, 1).clone()


def check_in_ball(images: Tensor, ball: linf.Ball, name: str) -> None:
    """Refuse images that an attack was not allowed to make; rounding errors of a float are allowed."""
    if not isinstance(images, Tensor) or images.shape != ball.centre.shape:
        raise ReactClipError(f"{name} returned {_shape(images)}, but it must return {_shape(ball.centre)}")
    excess = ball.excess(images).nan_to_num(torch.inf)
    worst = int(excess.argmax())
    if excess[worst] > 1e-5 or images.min() < 0.0 or images.max() > 1.0:
        raise ReactClipError(
            f"{name} left its budget or [0, 1]: photo {worst} of the batch exceeds the budget by {excess[worst]:.4g}; "
            "images must stay within it, as those of problem.ball.project"
        )


def _checked(logits: Tensor, y: Tensor) -> Tensor:
    """The logits as floats, refused unless they are finite, ``[n, K]``, and cover the labels."""
    least = max(2, int(y.max()) + 1)
    if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != len(y) or logits.shape[1] < least:
        raise ReactClipError(
            f"the model answered {len(y)} images with {_shape(logits)}, but an attack needs logits [{len(y)}, K] of at "
            f"least {least} classes, as a label is {int(y.max())}"
        )
    if not bool(logits.isfinite().all()):
        raise ReactClipError(
            "the model's logits hold NaN or infinite values; run the model in float32 and check its weights"
        )
    return logits if logits.dtype == torch.float64 else logits.float()


def _shape(value: object) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
