"""What chance has in store for images: everything that follows from their keys alone, drawn before anyone waits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from react_clip import noise
from react_clip.augment import Choices, WeakAugmentation
from react_clip.defenses.views import ANCHOR, AUGMENT, HIGH, LOW
from react_clip.graphs import Graphs

_MOST = 1024
"""Images whose lots are recorded: two hundred small operations keep the host busy, not the GPU, however many images."""


@dataclass(frozen=True, eq=False)
class Lots:
    """The random streams of every role, and what T(x) will do."""

    probes: Tensor
    """Keys ``[2, S, B]`` of the views at the weak and at the strong scale."""
    anchors: Tensor
    """Keys ``[B, M]`` of the views behind the anchors."""
    choices: Choices | None
    """Of the augmented view, where there is one."""


@dataclass(frozen=True)
class Plan:
    """How many lots are drawn, and which.

    >>> lots = Plan(samples=1, views=3, augmentation=WeakAugmentation(), dtype=torch.float32).draw(torch.arange(5))
    >>> lots.probes.shape, lots.anchors.shape, lots.choices.motion.shape
    (torch.Size([2, 1, 5]), torch.Size([5, 3]), torch.Size([5, 4]))
    """

    samples: int
    """Views of each probe."""
    views: int
    """Behind the anchor."""
    augmentation: WeakAugmentation | None
    """Whose choices are drawn; ``None`` where nobody asks for J."""
    dtype: torch.dtype

    def draw(self, keys: Tensor, *, recorded: bool = False) -> Lots:
        """The lots of the images with these keys; ``recorded``: by a CUDA graph."""
        drawn = _graphs(self)(keys) if recorded and _graphs(self).suit(keys) else self.tensors(keys)
        probes, anchors, *chosen = drawn
        return Lots(probes, anchors, Choices(*chosen) if chosen else None)

    def tensors(self, keys: Tensor) -> tuple[Tensor, ...]:
        """The same, one after the other."""

        def numbers(count: int) -> Tensor:
            return torch.arange(count, device=keys.device)

        # All roles at once: on a GPU the number of operations counts, not their size.
        streams = noise.fork(keys, numbers(ANCHOR + 1)[:, None])
        probes = noise.fork(streams[LOW : HIGH + 1, None], numbers(self.samples)[:, None])
        anchors = noise.fork(streams[ANCHOR][:, None], numbers(self.views))
        if self.augmentation is None:
            return probes, anchors
        choices = self.augmentation.choose(streams[AUGMENT], self.dtype)
        return probes, anchors, choices.values, choices.grain


@cache
def _graphs(plan: Plan) -> Graphs:
    return Graphs(plan.tensors, largest=_MOST)
