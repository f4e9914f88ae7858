"""Settings of a finetuning run; no torch is imported, so that wrong values are refused at once."""

from __future__ import annotations

import math
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from react_clip.config import Configuration, Count, PositiveLength, Whole
from react_clip.errors import ReactClipError

if TYPE_CHECKING:
    from torch import Tensor

    from react_clip.finetune.methods import Batch, Method


class InnerAttack(Configuration):
    """Sign-gradient ascent on a method's objective within ``eps`` of each image, from a uniform start."""

    eps: PositiveLength = 1 / 255
    step: PositiveLength = 1 / 255
    steps: Count = 2

    def __call__(self, method: Method, batch: Batch, keys: Tensor) -> Tensor:
        """Attacked pixels ``[B, 3, S, S]``; ``keys`` are random streams ``[B]``."""
        import torch

        from react_clip import linf

        ball, objective = linf.Ball(batch.clean, self.eps), method.objective(batch)

        def slope_at(pixels: Tensor) -> Tensor:
            with torch.enable_grad():
                moved = pixels.detach().requires_grad_()
                slope = linf.slope(objective(batch.student(moved)), moved)
            assert slope is not None, "image towers are differentiable"
            return slope

        return linf.ascend(slope_at, ball.random_start(keys), ball, steps=self.steps, step_size=self.step)


class Settings(Configuration):
    """Everything but the method with its optimiser and the data. One step uses ``batch * accumulate`` photos."""

    steps: Count = 300
    batch: Count = 64
    accumulate: Count = 1
    """Batches whose gradients are added before the weights are updated."""
    warmup: Whole | None = None
    """Steps until the full learning rate; a tenth of all by default."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision in which the towers compute; the weights are fp32 in either case."""
    augment: Literal["none", "flip", "crop"] = "flip"
    """``flip``: mirror half of the photos; ``crop``: a random crop as well."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    attack: InnerAttack = field(default_factory=InnerAttack)
    half: bool = False
    """Write the finished tower in fp16."""
    save_every: Count = 50
    """Steps between checkpoints."""

    def __post_init__(self) -> None:
        if self.warmup is not None and self.warmup >= self.steps:
            raise ReactClipError(
                f"warmup is {self.warmup}; it lies in 0 to {self.steps - 1}, below the {self.steps} steps"
            )

    @property
    def photos_per_step(self) -> int:
        """Photos that one step uses."""
        return self.batch * self.accumulate

    def schedule(self, step: int) -> float:
        """Share of the full learning rate: linear warm-up, then half a cosine down to zero; steps count from 0.

        >>> settings = Settings(steps=20, warmup=2)
        >>> [round(settings.schedule(step), 4) for step in (0, 1, 2, 11, 19)]
        [0.5, 1.0, 1.0, 0.5, 0.0076]
        """
        warmup = self.steps // 10 if self.warmup is None else self.warmup
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (self.steps - warmup)))

    def identity(self) -> dict[str, Any]:
        """The fields that decide the outcome, as JSON values: all but ``save_every``."""
        return {name: value for name, value in self.to_dict().items() if name != "save_every"}
