"""What all attacks share: a config object that is called on (model, x, y)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from react_clip import noise
from react_clip.attacks.losses import margin
from react_clip.attacks.problem import (
    Found,
    Model,
    Problem,
    Progress,
    Steps,
    budgets,
    check_images,
    check_labels,
)
from react_clip.config import PixelLength, Registered, Registry

__all__ = ["Attack", "AttackResult", "Model", "from_dict", "names"]


@dataclass(frozen=True)
class AttackResult:
    """What an attack hands back; every field has one entry per image.

    ``success`` and ``loss`` come from one last forward pass over ``images``. For a randomised model that pass is a
    fresh draw, so an image that the search saw broken may count as unbroken, and the other way round.
    """

    images: Tensor
    """``[B, C, H, W]`` fp32 in [0, 1], within eps of the input."""
    success: Tensor
    """``[B]`` bool: the model's answer on ``images`` differs from the label."""
    loss: Tensor
    """``[B]`` fp32: final value of the attack's own loss."""
    queries: Tensor
    """``[B]`` int64: forward passes spent on that image, the last one included. Backward passes are not counted."""


class Attack(Registered, ABC):
    """A configuration; call it on a model, images and labels. Its repr is the log line.

    The model runs as it is handed over (put it in eval mode); gradients are taken with respect to pixels only, and
    neither its parameters nor ``x`` are touched. All randomness comes from streams keyed by an image's pixels and the
    seed: no result depends on the batch an image sits in.
    """

    registry: ClassVar[Registry[Attack]] = Registry("attack", "react_clip.attacks")
    eps: PixelLength = 4 / 255

    @property
    @abstractmethod
    def name(self) -> str:
        """Short name for tables, such as ``pgd-10``."""

    @property
    @abstractmethod
    def total_steps(self) -> int:
        """Steps at most, for progress bars."""

    @abstractmethod
    def search(self, problem: Problem) -> Tensor:
        """Look for adversarial images within the problem's balls; return the best candidates."""

    def own_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss reported in the result; the margin unless an attack climbs another one."""
        return margin(logits, labels)

    @torch.inference_mode(False)
    @torch.no_grad()
    def __call__(
        self,
        model: Model,
        x: Tensor,
        y: Tensor,
        *,
        seed: noise.Seed = 0,
        eps: Tensor | float | None = None,
        progress: Progress | None = None,
    ) -> AttackResult:
        """Attack ``[B, C, H, W]`` pixels in [0, 1] with labels ``[B]``.

        ``eps`` overrides the configured budget, with one number or a ``[B]`` tensor. ``progress(done_steps,
        total_steps)`` is called once per step; where images break early it jumps to the end.
        """
        check_images(x)
        check_labels(y, len(x))
        radius = budgets(self.eps if eps is None else eps, x)
        # Copies, so that the result never shares memory with the input and inference tensors can be differentiated.
        pixels, labels = x.detach().float().clone(), y.detach().to(x.device, torch.int64, copy=True)
        queries = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        if len(x) == 0:
            nothing = torch.zeros(0, device=x.device)
            return AttackResult(pixels, nothing.bool(), nothing, queries)

        steps, rows = Steps(self.total_steps, progress), torch.arange(len(x), device=x.device)
        problem = Problem(model, pixels, labels, radius, noise.stream_keys(pixels, seed), rows, queries, steps)
        images = self.search(problem)
        steps.finish()
        final = Found(images, problem.logits(images))
        return AttackResult(images, final.broken(labels), self.own_loss(final.logits, labels).float(), queries)


def names() -> list[str]:
    """The kinds that :func:`from_dict` knows.

    >>> names()
    ['apgd', 'autoattack', 'cw', 'fab', 'pgd', 'square']
    """
    return Attack.registry.names()


def from_dict(config: Mapping[str, Any] | str) -> Attack:
    """An attack from plain values, as a recipe file holds them; lengths may be written ``"4/255"``.

    >>> from_dict({"kind": "pgd", "eps": "8/255", "steps": 20})
    PGD(eps=8/255, steps=20, step_size=1/255, loss=ce, random_start=True)
    """
    return Attack.registry.read(config)
