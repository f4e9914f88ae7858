r"""Defences that move the pixels along a gradient before they classify: TTC, DOC, MAC, Anti-Adv and HD.

.. math:: x_{k+1} = \Pi\big(x_k + s\,\mathrm{sign}\,\nabla_x \textstyle\sum_b \ell(F(x_k^b))\big)

with F the raw feature and :math:`\Pi` the projection onto the eps-ball around the image and onto [0, 1]. No label is
used and no parameter of the encoder changes. For an attacker who knows the defence, gradients are taken at the moved
pixels, where the answer is, as if the movement were a constant (BPDA).
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from react_clip import functional, linf, noise
from react_clip.augment import JitterFirst
from react_clip.config import Count, NonNegative, PixelLength, Positive, Share
from react_clip.defenses.base import Defended, Defense, answer, straight_through
from react_clip.encoders.base import Encoder
from react_clip.errors import ReactClipError
from react_clip.linf import Ball
from react_clip.noise import Seed
from react_clip.preprocess import Images
from react_clip.zeroshot import ZeroShotClassifier

START, DETOUR = 0, 2
"""Branches of an image's random stream."""
VIEW, VIEW_START, VIEW_PROBE = range(3)
"""The same for MAC: the streams of its views, and two branches of each view's stream."""

Objective = Callable[[Tensor], Tensor]
"""From raw features ``[B, D]`` to one value per image ``[B]``."""


class Counterattack(Defense):
    """Base class: splits the batch into chunks, which a subclass defends in ``_defend``.

    It also works inside ``no_grad`` and ``inference_mode``.
    """

    max_batch: Count = field(default=64, kw_only=True)
    """Most views in one encoder call."""

    def __call__(self, clf: ZeroShotClassifier, images: Images, seed: Seed = 0) -> Defended:
        """Defended answers for pixels in [0, 1], PIL images, paths or bytes; see :class:`Defended`."""
        if any(tensor.is_inference() for tensor in (*clf.parameters(), *clf.buffers())):
            raise ReactClipError(
                f"the classifier was made inside torch.inference_mode, where {self.name} cannot take gradients; make "
                "it outside (calling it inside is fine)"
            )
        with torch.inference_mode(False):
            pixels = clf.encoder.prepare(images)
            if not (torch.is_grad_enabled() and pixels.requires_grad):
                # The clone turns a tensor made in inference mode, which autograd refuses, into a plain one.
                pixels = pixels.detach().clone()
            keys = noise.stream_keys(pixels, seed)
            parts = []
            for start in range(0, len(pixels), self.max_batch):
                chunk, streams = (tensor[start : start + self.max_batch] for tensor in (pixels, keys))
                with torch.no_grad():
                    parts.append(self._defend(clf, chunk, streams))
            return _join(parts)

    @abstractmethod
    def _defend(self, clf: ZeroShotClassifier, pixels: Tensor, keys: Tensor) -> Defended:
        """Answers for at most ``max_batch`` images; ``keys`` are their random streams."""


def encode_moved(encoder: Encoder, pixels: Tensor, moved: Tensor) -> Tensor:
    """Unit features of the moved images; where the pixels require gradients, the movement counts as a constant."""
    if not pixels.requires_grad:
        return encoder.encode_views(moved)
    with torch.enable_grad():
        return encoder.encode_views(straight_through(moved, pixels))


def distance_from(anchor: Tensor) -> Objective:
    r"""The objective :math:`\lVert F(x') - F(x) \rVert^2` for given raw features of x.

    >>> distance_from(torch.zeros(1, 2))(torch.tensor([[3.0, 4.0]]))
    tensor([25.])
    """
    return lambda features: (features - anchor).square().sum(-1)


def relative_distance(features: Tensor, anchor: Tensor) -> Tensor:
    r""":math:`\lVert F(x') - F(x) \rVert / \lVert F(x) \rVert` of raw features.

    >>> relative_distance(torch.tensor([[3.0, 6.0]]), torch.tensor([[3.0, 4.0]]))
    tensor([0.4000])
    """
    # The floor is for an encoder that answers zero.
    return functional.drift(features, anchor) / functional.drift(anchor, torch.zeros_like(anchor)).clamp_min(1e-12)


def gradient(encoder: Encoder, images: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
    """Raw features of images and the gradient of the objective in their pixels: one forward, one backward pass."""
    with torch.enable_grad():
        pixels = images.detach().requires_grad_()
        features = encoder.raw_features(pixels)
        slope = linf.slope(objective(features), pixels)
    if slope is None:
        raise ReactClipError(
            f"features of {encoder.name!r} carry no gradient to the pixels, which this defence needs; use an "
            "encoder that runs in torch, or a defence without gradients such as ReACT"
        )
    return features.detach(), slope


def ascend(
    encoder: Encoder, images: Tensor, objective: Objective, ball: Ball, *, steps: int, step_size: float
) -> Tensor:
    """The images after ``steps`` sign steps up the objective, inside the ball."""
    return linf.ascend(
        lambda current: gradient(encoder, current, objective)[1], images, ball, steps=steps, step_size=step_size
    )


def iterate_weights(steps: int, beta: float) -> list[float]:
    """Weights of the start and of the iterates after it: each counts exp(beta) times as much as the one before.

    >>> [round(weight, 3) for weight in iterate_weights(2, 2.0)]
    [0.016, 0.117, 0.867]
    """
    return (beta * torch.arange(steps + 1, dtype=torch.float64)).softmax(0).tolist()


def _join(parts: Sequence[Defended]) -> Defended:
    """One result from those of consecutive chunks."""
    if len(parts) == 1:
        return parts[0]
    values: dict[str, Any] = {item.name: getattr(parts[0], item.name) for item in dataclasses.fields(Defended)}
    for name in [name for name, value in values.items() if isinstance(value, Tensor)]:
        values[name] = torch.cat([getattr(part, name) for part in parts])
    return Defended(**values)


class TTC(Counterattack):
    r"""Counterattack the images whose feature hardly changes under a small random perturbation.

    Adversarial images are "falsely stable": a random start :math:`\delta_0` changes their raw feature less than that of
    clean images. Where the change is below tau, N sign steps increase the feature distance, and the weighted mean of
    all iterates is classified:

    .. math::
        \rho = \frac{\lVert F(x + \delta_0) - F(x) \rVert}{\lVert F(x) \rVert}, \qquad
        \delta = \begin{cases} \sum_{i=0}^N w_i \delta_i,\; w_i \propto e^{\beta i} & \rho < \tau \\
                 \delta_0 & \text{else} \end{cases}, \qquad
        \delta_{i+1} = \Pi(\delta_i + s\,\mathrm{sign}\,\nabla \lVert F(x + \delta_i) - F(x) \rVert^2)

    ``score`` is :math:`\rho`, ``gated`` is :math:`\rho < \tau`. Such an image costs N + 2 forward and N backward
    passes. Any other costs 2 and 1: the pass that measures :math:`\rho` is also the answer, and its gradient is taken
    with it, before the gate is known.

    >>> TTC().cost(), TTC(steps=5).cost()
    ((4, 2), (7, 5))
    """

    kind = "ttc"
    colour = "#D55E00"
    eps: PixelLength = 4 / 255
    """Largest change of a pixel value by the defence."""
    steps: Count = 2
    """N; the published value against strong attacks is 5."""
    step_size: PixelLength = 1 / 255
    """Change of a pixel value per step."""
    tau: float = 0.2
    """The counterattack is used where the relative change of the raw feature stays below this."""
    beta: float = 2.0
    """Exponent of the weights: each iterate counts exp(beta) times as much as the one before."""

    def cost(self) -> tuple[int, int]:
        """Most forward and backward passes an image can need."""
        return self.steps + 2, self.steps

    def _defend(self, clf: ZeroShotClassifier, pixels: Tensor, keys: Tensor) -> Defended:
        ball = Ball(pixels, self.eps)
        anchor = clf.encoder.raw_features(pixels)
        start = ball.random_start(noise.fork(keys, START))
        features, slope = gradient(clf.encoder, start, distance_from(anchor))
        rho = relative_distance(features, anchor)
        gated = rho < self.tau
        output, moved = functional.normalize(features), start
        rows = gated.nonzero().flatten()
        if len(rows):
            mixture = self._mixture(clf, ball.take(rows), anchor[rows], start[rows], slope[rows])
            moved = moved.index_copy(0, rows, mixture)
            output = output.index_copy(0, rows, clf.encoder.encode_views(mixture))
        if pixels.requires_grad:
            output = encode_moved(clf.encoder, pixels, moved)
        return answer(
            clf,
            output,
            passes=(2 + self.steps * gated.long(), 1 + (self.steps - 1) * gated.long()),
            score=rho,
            gated=gated,
        )

    def _mixture(self, clf: ZeroShotClassifier, ball: Ball, anchor: Tensor, start: Tensor, slope: Tensor) -> Tensor:
        """The counterattacked images: a weighted mean of the start and of all N iterates."""
        first, second, *later = iterate_weights(self.steps, self.beta)
        moved = ball.step(start, slope, self.step_size)
        mixture = first * start + second * moved
        for weight in later:
            moved = ascend(clf.encoder, moved, distance_from(anchor), ball, steps=1, step_size=self.step_size)
            mixture = mixture + weight * moved
        # Only rounding can have left the ball.
        return ball.project(mixture)


class DOC(Counterattack):
    r"""TTC's counterattack with momentum and orthogonal noise, weighted by how stable the image's feature is.

    With g the unit gradient of :math:`\lVert F(x + \delta) - F(x) \rVert^2` and n unit noise orthogonal to it,

    .. math::
        m_1 = g + \lambda n, \qquad m_{t+1} = \mu\,m_t + (1 - \mu)(g + \lambda n), \qquad
        \delta_{t+1} = \Pi(\delta_t + s\,\mathrm{sign}\,m_{t+1})

    .. math::
        w = \mathrm{sigmoid}(\gamma\,[\tau - \rho]), \qquad
        \delta = w \textstyle\sum_t w_t \delta_t + (1 - w)\,\delta_0, \qquad w_t \propto e^{\beta t}

    with TTC's random start :math:`\delta_0` and its relative change :math:`\rho`. ``score`` is :math:`\rho`, ``gated``
    is :math:`\rho < \tau`. Costs ``steps`` + 2 forward and ``steps`` backward passes.

    This is what a public port of the authors' code does with plain CLIP. The paper's text differs: it compares the mean
    cosine distance under several draws of noise (without a value for :math:`\tau` or :math:`\gamma`), starts from
    :math:`m_0 = 0`, and takes :math:`\delta_T` in place of the weighted mean.

    >>> DOC().cost()
    (6, 4)
    """

    kind = "doc"
    colour = "#CC79A7"
    eps: PixelLength = 4 / 255
    """Largest change of a pixel value by the defence."""
    steps: Count = 4
    """Gradient steps."""
    step_size: PixelLength = 3 / 255
    """Change of a pixel value per step."""
    diversity: NonNegative = 0.05
    """Lambda, the length of the orthogonal noise beside the unit gradient."""
    momentum: Share = 0.75
    """Mu."""
    tau: float = 0.155
    """The counterattack has half its weight here. The port's experiments use 0.155 and a ``gamma`` of 75; its second
    version calls 0.3 and 20 the authors' defaults, which would change clean images more than TTC does."""
    gamma: NonNegative = 75.0
    """Steepness of the weight."""
    beta: float = 2.0
    """Exponent of the iterates' weights, as in :class:`TTC`."""

    def cost(self) -> tuple[int, int]:
        """Forward and backward passes of an image."""
        return self.steps + 2, self.steps

    def _defend(self, clf: ZeroShotClassifier, pixels: Tensor, keys: Tensor) -> Defended:
        ball = Ball(pixels, self.eps)
        anchor = clf.encoder.raw_features(pixels)
        start = moved = ball.random_start(noise.fork(keys, START))
        first, *later = iterate_weights(self.steps, self.beta)
        mixture, direction, detours = first * start, torch.zeros_like(start), noise.fork(keys, DETOUR)
        for step, weight in enumerate(later):
            features, slope = gradient(clf.encoder, moved, distance_from(anchor))
            if step == 0:
                rho = relative_distance(features, anchor)
            fresh = self._diversified(slope, noise.fork(detours, step))
            direction = fresh if step == 0 else self.momentum * direction + (1.0 - self.momentum) * fresh
            moved = ball.step(moved, direction, self.step_size)
            mixture = mixture + weight * moved

        strength = (self.gamma * (self.tau - rho)).sigmoid().to(pixels.dtype)[:, None, None, None]
        # Only rounding can leave the ball between points inside.
        output = encode_moved(clf.encoder, pixels, ball.project(start + strength * (mixture - start)))
        return answer(clf, output, passes=self.cost(), score=rho, gated=rho < self.tau)

    def _diversified(self, slope: Tensor, keys: Tensor) -> Tensor:
        """Unit gradients plus ``diversity`` times unit noise orthogonal to them."""
        unit = F.normalize(slope.flatten(1))
        grain = noise.normal(keys, unit.shape[1:]).to(unit.dtype)
        grain = F.normalize(grain - (grain * unit).sum(1, keepdim=True) * unit)
        return (unit + self.diversity * grain).reshape(slope.shape)


class MAC(Counterattack):
    r"""Counterattack the image and a weakly augmented view, each weighted by how far augmentation moves its feature.

    For each view v, with :math:`\delta` from sign steps up :math:`\lVert F(v + \delta) - F(v) \rVert^2` from a uniform
    start in the ball, and T' another draw of the augmentation T,

    .. math:: w = \mathrm{sigmoid}\Big(\frac{1}{T}\Big[\frac{\lVert F(T'v) - F(v) \rVert}{\lVert F(v) \rVert}
              - \tau\Big]\Big), \qquad z = \tfrac1V \textstyle\sum_v z(v + w\,\delta)

    ``score`` is the largest relative change over the views, ``gated`` whether it reaches :math:`\tau`, so that some
    view moved by half its counterattack or more. ``features`` are the unit mean of the views' unit features. Costs
    (``steps`` + 3) forward and ``steps`` backward passes per view.

    >>> MAC().cost()
    (14, 8)
    """

    kind = "mac"
    colour = "#009E73"
    eps: PixelLength = 8 / 255
    """Largest change of a pixel value by the defence."""
    steps: Count = 4
    """Gradient steps."""
    step_size: PixelLength = 2 / 255
    """Change of a pixel value per step."""
    tau: float = 0.7
    temperature: Positive = 0.01
    views: Count = 2
    """The image itself and its augmentations."""
    augmentation: JitterFirst = field(default_factory=JitterFirst)
    """T and T'."""

    def cost(self) -> tuple[int, int]:
        """Forward and backward passes of an image."""
        return self.views * (self.steps + 3), self.views * self.steps

    def _defend(self, clf: ZeroShotClassifier, pixels: Tensor, keys: Tensor) -> Defended:
        features, ratios = [], []
        for number in range(self.views):
            stream = noise.fork(noise.fork(keys, VIEW), number)
            with torch.set_grad_enabled(pixels.requires_grad):
                view = pixels if number == 0 else self.augmentation(pixels, stream)
            unit, ratio = self._counterattack(clf.encoder, view, stream)
            features.append(unit)
            ratios.append(ratio)
        score = torch.stack(ratios).amax(0)
        with torch.set_grad_enabled(pixels.requires_grad):
            unit = torch.stack(features)
            mean, logits = functional.normalize(unit.mean(0)), clf.logits(unit).mean(0)
        return answer(
            clf,
            mean,
            logits=logits,
            passes=self.cost(),
            score=score,
            gated=score >= self.tau,
        )

    def _counterattack(self, encoder: Encoder, view: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
        """Unit features of one counterattacked view, and how far the augmentation moved its raw feature."""
        ball = Ball(view, self.eps)
        anchor = encoder.raw_features(view)
        probe = encoder.raw_features(self.augmentation(view, noise.fork(stream, VIEW_PROBE)))
        ratio = relative_distance(probe, anchor)
        start = ball.random_start(noise.fork(stream, VIEW_START))
        moved = ascend(encoder, start, distance_from(anchor), ball, steps=self.steps, step_size=self.step_size)
        weight = ((ratio - self.tau) / self.temperature).sigmoid().to(view.dtype)[:, None, None, None]
        return encode_moved(encoder, view, ball.project(view + weight * (moved - view))), ratio


class AntiAdv(Counterattack):
    r"""Move the image towards a higher probability of the class that CLIP predicts for it.

    .. math:: \delta_{k+1} = \delta_k - a\,\mathrm{sign}\,\nabla_\delta \mathrm{CE}(x + \delta_k, \hat y), \qquad
              \hat y = \arg\max_c p_c(x), \qquad \delta_0 = 0

    There is no ball, and pixels may leave [0, 1], as in the released code. Every image is treated, with ``steps`` + 1
    forward (the first step's pass finds :math:`\hat y` too) and ``steps`` backward passes. Nothing is drawn at random,
    so the seed is not used.

    >>> AntiAdv().cost()
    (3, 2)
    """

    kind = "anti-adv"
    label = "Anti-Adv"
    colour = "#8C6D31"
    steps: Count = 2
    step_size: PixelLength = 4 / 255
    """a. A guess: no value is published for CLIP, and that for CIFAR (0.15) suits classifiers of 32 pixels."""

    def cost(self) -> tuple[int, int]:
        """Forward and backward passes of an image."""
        return self.steps + 1, self.steps

    def _defend(self, clf: ZeroShotClassifier, pixels: Tensor, keys: Tensor) -> Defended:
        label: Tensor | None = None

        def certainty(features: Tensor) -> Tensor:
            """Log-probability of the predicted class; the first call sees the original image and sets that class."""
            nonlocal label
            scores = clf.logits(functional.normalize(features)).log_softmax(-1)
            if label is None:
                label = scores.detach().argmax(-1, keepdim=True)
            return scores.gather(-1, label).squeeze(-1)

        moved = pixels
        for _ in range(self.steps):
            moved = moved + self.step_size * gradient(clf.encoder, moved, certainty)[1].sign()
        return answer(clf, encode_moved(clf.encoder, pixels, moved), passes=self.cost())


class HD(Counterattack):
    r"""Perturb the image so that the loss summed over all classes rises, then classify it.

    The true class, to which the model responds most smoothly, is expected to lose least.

    .. math:: \max_{\lVert \delta \rVert_\infty \le \epsilon} \sum_c \mathrm{CE}(x + \delta, c)
              = \max_{\lVert \delta \rVert_\infty \le \epsilon} -\sum_c \log p_c(x + \delta)

    Every image is treated, with ``steps`` + 1 forward and ``steps`` backward passes.

    >>> HD().cost()
    (21, 20)
    """

    kind = "hd"
    colour = "#B5A900"
    eps: PixelLength = 8 / 255
    """Largest change of a pixel value by the defence."""
    steps: Count = 20
    """Gradient steps."""
    step_size: PixelLength = 4 / 255

    def cost(self) -> tuple[int, int]:
        """Forward and backward passes of an image."""
        return self.steps + 1, self.steps

    def _defend(self, clf: ZeroShotClassifier, pixels: Tensor, keys: Tensor) -> Defended:
        def loss_of_all_classes(features: Tensor) -> Tensor:
            return -clf.logits(functional.normalize(features)).log_softmax(-1).sum(-1)

        ball = Ball(pixels, self.eps)
        start = ball.random_start(noise.fork(keys, START))
        moved = ascend(clf.encoder, start, loss_of_all_classes, ball, steps=self.steps, step_size=self.step_size)
        return answer(clf, encode_moved(clf.encoder, pixels, moved), passes=self.cost())
