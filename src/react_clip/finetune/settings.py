"""How long, how fast and in which precision a tower is finetuned."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from react_clip.attacks.kinds import check_choice, check_count
from react_clip.errors import ReactClipError
from react_clip.finetune.inner import InnerAttack

AUGMENTATIONS = ("none", "flip", "crop")
PRECISIONS = ("fp32", "bf16")


@dataclass(frozen=True)
class Settings:
    """Everything but the method and the data. One step sees ``batch * accumulate`` photos."""

    steps: int = 300
    batch: int = 64
    accumulate: int = 1
    """Batches whose gradients are added before the weights move."""
    lr: float = 1e-5
    weight_decay: float = 1e-4
    warmup: int | None = None
    """Steps until the full learning rate; a tenth of all by default."""
    dtype: str = "fp32"
    """What the towers compute in; the weights are fp32 in either case."""
    augment: str = "flip"
    """``none``, ``flip`` (mirrored half of the time) or ``crop`` (a random crop as well)."""
    seed: int = 0
    attack: InnerAttack = field(default_factory=InnerAttack)
    half: bool = False
    """Write the finished tower in fp16."""
    save_every: int = 50

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "accumulate", "save_every"):
            check_count(name, getattr(self, name))
        check_choice("dtype", self.dtype, PRECISIONS)
        check_choice("augment", self.augment, AUGMENTATIONS)
        if not 0 < self.lr < 1:
            raise ReactClipError(f"lr is {self.lr}; the learning rate lies between 0 and 1, such as 1e-5")
        if not 0 <= self.weight_decay < 1:
            raise ReactClipError(f"weight_decay is {self.weight_decay}; it lies in [0, 1), such as 1e-4")
        if self.warmup is not None and not 0 <= self.warmup < self.steps:
            raise ReactClipError(
                f"warmup is {self.warmup}; it lies in 0 to {self.steps - 1}, below the {self.steps} steps"
            )
        if not 0 <= self.seed < 2**63:
            raise ReactClipError(f"seed is {self.seed}; it lies in 0 to 2**63 - 1")

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
        values = asdict(self)
        del values["save_every"]
        return values
