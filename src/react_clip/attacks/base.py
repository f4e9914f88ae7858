"""The base class of all attacks and the result that they return."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from react_clip import linf, noise
from react_clip.attacks.problem import (
    Candidates,
    Model,
    Problem,
    Progress,
    budgets,
    check_in_ball,
    check_input,
    encoder_of,
)
from react_clip.config import PixelLength, Registered, Registry
from react_clip.defenses.base import Defense
from react_clip.errors import ReactClipError
from react_clip.zeroshot import ZeroShotClassifier

OBLIVIOUS, TRANSFER, ADAPTIVE = "oblivious", "transfer", "adaptive"
"""Threat models: the attacker knows CLIP but not the defence; only another model; CLIP and the defence."""

# Kinds in recipes of earlier versions, and what they are now.
_OBJECTIVES = ("through", "both", "evade", "bpda", "feature")
_EARLIER = {f"adaptive-{objective}": {"kind": "adaptive", "objective": objective} for objective in _OBJECTIVES}
_EARLIER["cw"] = {"kind": "pgd", "loss": "margin"}


@dataclass(frozen=True, eq=False)
class AttackResult:
    """Adversarial images and how the target answers them; every field has one entry per image.

    A plain model is judged by one more answer on ``images``; if it is random, that answer is a fresh draw. A defended
    classifier is judged by 10 fresh draws of the defence's noise.
    """

    images: Tensor
    """``[B, C, H, W]`` fp32 in [0, 1], within eps of the input, rounded to 8 bits as a file holds them."""
    success: Tensor
    """``[B]`` bool: more than half of the judging answers are wrong."""
    crafted: Tensor
    """``[B]`` bool: the attack on a plain model had succeeded before its images were rounded."""
    loss: Tensor
    """``[B]`` fp32: mean margin of the best wrong class over the judging answers."""
    queries: Tensor
    """``[B]``: forward passes of the encoder, judging included; a view of another size counts as its tokens."""
    backward: Tensor
    """``[B]``: backward passes of the encoder, likewise."""
    broken: Tensor
    """``[B]`` fp32: fraction of the judging answers that are wrong."""
    flat: Tensor
    """``[B]`` fp32: 1 if the first gradient was zero in every pixel, 0 if not, NaN for attacks without gradients."""
    parts: dict[str, Tensor] = field(default_factory=dict)
    """For a suite: ``broken`` of each member's images by the member's name; NaN where it was not run. AutoAttack, whose
    members run in turn, numbers them: ``1 of 4: apgd-ce-100``."""


class Attack(Registered, ABC):
    """A configuration; call it on a target, images and labels. Its repr is the log line.

    The target is any map from [0, 1] pixels to logits (put it in eval mode). Gradients are taken with respect to the
    pixels only; neither the target's parameters nor ``x`` change. All randomness comes from streams keyed by an image's
    pixels and the seed, so no result depends on the batch an image sits in.
    """

    registry: ClassVar[Registry[Attack]] = Registry("attack", "react_clip.attacks", _EARLIER)
    threats: ClassVar[tuple[str, ...]] = (OBLIVIOUS, TRANSFER)
    """Threat models in which the attack can be used."""
    natural: ClassVar[bool] = False
    """True for damage that nobody intends: an evaluation applies it to all images, and it has no budget."""
    most: ClassVar[float] = 1.0
    """Largest budget."""
    eps: PixelLength = 4 / 255
    """Budget: the largest change of a pixel value."""

    @property
    def name(self) -> str:
        """Short name for tables, such as ``square-5000``: the kind with the number of steps or queries."""
        length = getattr(self, "steps", getattr(self, "queries", None))
        return self.kind if length is None else f"{self.kind}-{length}"

    @abstractmethod
    def search(self, problem: Problem) -> Tensor:
        """The best adversarial images ``[n, C, H, W]`` inside ``problem.ball``; called with gradients enabled."""

    def ball(self, x: Tensor, eps: Tensor, keys: Tensor) -> linf.Ball:
        """The allowed images around ``x``, for budgets ``[B, 1, 1, 1]``; ``keys`` ``[B]`` are random streams."""
        return linf.Ball(x, eps)

    def target(self, clf: ZeroShotClassifier, defense: Defense) -> Model:
        """The target to pass to the attack: the plain classifier, or the classifier behind the defence."""
        return clf

    @torch.inference_mode(False)
    @torch.no_grad()
    def __call__(
        self,
        target: Model,
        x: Tensor,
        y: Tensor,
        *,
        seed: noise.Seed = 0,
        eps: Tensor | float | None = None,
        progress: Progress | None = None,
    ) -> AttackResult:
        """Attack ``[B, C, H, W]`` pixels in [0, 1] with labels ``[B]``.

        ``eps`` overrides the configured budget, with one number or a ``[B]`` tensor. ``progress(done_steps)`` is called
        after every step.
        """
        check_input(x, y)
        radius = budgets(self.eps if eps is None else eps, x, self.most)
        # Copies, so that the result never shares memory with the input and inference tensors can be differentiated.
        pixels, labels = x.detach().float().clone(), y.detach().to(x.device, torch.int64, copy=True)
        if len(x) == 0:
            none = torch.zeros(0, device=x.device)
            return AttackResult(pixels, none.bool(), none.bool(), none, none, none, none, none)
        target, seed = self._prepared(target, seed)
        encoder = encoder_of(target)
        keys, rows = noise.stream_keys(pixels, seed), torch.arange(len(x), device=x.device)
        with nullcontext() if encoder is None else encoder.counting() as passes:
            ball, spent = self.ball(pixels, radius, keys), torch.zeros(2, len(x), device=x.device)
            flat = torch.full_like(spent[0], torch.nan)
            problem = Problem(target, ball, labels, keys, rows, passes, spent, flat, progress)
            best, crafted, parts = self.run(problem)
        spent = problem.spent
        if passes is not None:  # passes outside of the problem's methods, as those of another library, have no image
            total = torch.tensor([passes.forward, passes.backward], device=x.device)
            spent = spent + ((total - spent.sum(1)) / len(x))[:, None]
        forward, backward = spent
        return AttackResult(
            *(best.images, best.wrong > 0.5, crafted, best.loss.float(), forward, backward, best.wrong),
            *(problem.flat, parts),
        )

    def run(self, problem: Problem) -> tuple[Candidates, Tensor, dict[str, Tensor]]:
        """Search, round to 8 bits, then judge; returns the images, ``crafted`` and ``parts`` of the result."""
        found = self.found(problem)
        rounded = found if self.natural else problem.ball.on_8_bits(found)
        crafted = problem.candidates(found).wrong > 0.5
        return problem.candidates(rounded), crafted, problem.parts

    def found(self, problem: Problem) -> Tensor:
        """The images of the search, checked."""
        with torch.enable_grad():
            images = self.search(problem)
        if not self.natural:
            check_in_ball(images, problem.ball, self.name)
        return images.detach().to(problem.x)

    def _prepared(self, target: Model, seed: noise.Seed) -> tuple[Model, noise.Seed]:
        """The checked target, and the seed of the attack's random streams."""
        return target, seed


def check_inner(outer: Attack, inner: Attack) -> None:
    """Refuse an attack inside another that could not run there, or would have a budget of its own."""
    own_budget = inner.eps != Attack.eps or type(inner).ball is not Attack.ball
    if OBLIVIOUS not in inner.threats or inner.natural or own_budget:
        why = "it knows the defence, is damage, or has its own eps or ball"
        advice = "name an attack such as pgd or apgd, and give eps to the whole"
        raise ReactClipError(f"{outer.kind} cannot use {inner.name!r}: {why}; {advice}")


def names(threat: str | None = None) -> list[str]:
    """The kinds that :func:`from_dict` knows; only those for a threat model if one is given.

    >>> names("oblivious")
    ['apgd', 'autoattack', 'corruption', 'di-fgsm', 'fab', ..., 'square', 'targeted', 'universal']
    """
    kinds = Attack.registry.names()
    return kinds if threat is None else [kind for kind in kinds if threat in Attack.registry.get(kind).threats]


def from_dict(config: Mapping[str, Any] | str) -> Attack:
    """An attack from plain values, as a recipe file holds them; lengths may be written ``"4/255"``.

    >>> from_dict({"kind": "pgd", "eps": "8/255", "steps": 20})
    PGD(eps=8/255, steps=20, step_size=1/255, loss=ce, random_start=True, margin=0.0)
    """
    return Attack.registry.read(config)
