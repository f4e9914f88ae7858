"""The optimiser of a finetuning method: SGD with momentum, or AdamW."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from react_clip.config import Configuration

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_Rate = Annotated[float, Field(gt=0, lt=1)]
_Decay = Annotated[float, Field(ge=0, lt=1)]


class Optimiser(Configuration):
    """Algorithm, largest learning rate and weight decay of a training; :class:`Settings` has the schedule."""

    algorithm: Literal["sgd", "adamw"]
    lr: _Rate
    """Largest learning rate."""
    weight_decay: _Decay = 0.0
    momentum: _Decay = 0.9
    """Momentum of SGD; AdamW takes torch's default betas instead."""

    def make(self, weights: Iterable[Tensor], *, fused: bool) -> torch.optim.Optimizer:
        """The optimiser of these weights."""
        import torch

        if self.algorithm == "sgd":
            return torch.optim.SGD(
                weights, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay, fused=fused
            )
        return torch.optim.AdamW(weights, lr=self.lr, weight_decay=self.weight_decay, fused=fused)
