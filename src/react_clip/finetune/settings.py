"""How long, how fast and in which precision a tower is finetuned."""

from __future__ import annotations

import math
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import Field

from react_clip.config import Configuration, Count, Whole
from react_clip.errors import ReactClipError
from react_clip.finetune.inner import InnerAttack

AUGMENTATIONS = ("none", "flip", "crop")
PRECISIONS = ("fp32", "bf16")


class Settings(Configuration):
    """Everything but the method and the data. One step sees ``batch * accumulate`` photos."""

    steps: Count = 300
    batch: Count = 64
    accumulate: Count = 1
    """Batches whose gradients are added before the weights move."""
    lr: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    weight_decay: Annotated[float, Field(ge=0, lt=1)] = 1e-4
    warmup: Whole | None = None
    """Steps until the full learning rate; a tenth of all by default."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """What the towers compute in; the weights are fp32 in either case."""
    augment: Literal["none", "flip", "crop"] = "flip"
    """``none``, ``flip`` (mirrored half of the time) or ``crop`` (a random crop as well)."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    attack: InnerAttack = field(default_factory=InnerAttack)
    half: bool = False
    """Write the finished tower in fp16."""
    save_every: Count = 50

    def __post_init__(self) -> None:
        if self.warmup is not None and self.warmup >= self.steps:
            raise ReactClipError(
                f"warmup is {self.warmup}; it lies in 0 to {self.steps - 1}, below the {self.steps} steps"
            )

    @property
    def photos_per_step(self) -> int:
        """How many photos one step sees."""
        return self.batch * self.accumulate

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then half a cosine down to zero; steps count from 0.

        >>> settings = Settings(steps=20, warmup=2, lr=1e-5)
        >>> [f"{settings.learning_rate(step):.1e}" for step in (0, 1, 2, 11, 19)]
        ['5.0e-06', '1.0e-05', '1.0e-05', '5.0e-06', '7.6e-08']
        """
        warmup = self.steps // 10 if self.warmup is None else self.warmup
        if step < warmup:
            return self.lr * (step + 1) / warmup
        return self.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (self.steps - warmup)))

    def to_dict(self) -> dict[str, Any]:
        """What decides the outcome, as plain values; how often it is saved does not."""
        values = super().to_dict()
        del values["save_every"]
        return values
