"""Settings of a finetuning run; no torch is imported, so that wrong values are refused at once.

The defaults are a measured recipe: with them FARE takes ViT-B/16 from 0 to 51 % against white-box PGD-30 at 1/255.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field

from react_clip.config import Configuration, Count, Fraction, FractionRange, NonNegative, PositiveLength, Whole
from react_clip.errors import ReactClipError


class Settings(Configuration, described=True):
    """Everything but the method and the photos; ``react-clip finetune`` has an option for every field."""

    steps: Count = 1400
    """Updates of the weights."""
    batch: Count = 256
    """Photos of an update."""
    lr: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Largest learning rate; the method's own by default."""
    warmup: Whole | None = None
    """Steps until the largest learning rate; 100 by default, or a tenth of a shorter run."""
    eps: PositiveLength = 2 / 255
    """Largest change of a pixel in the attack at the end of the run."""
    eps_start: PositiveLength = 0.5 / 255
    """The same at the start; from there it rises in a line."""
    ramp: Fraction = 0.2
    """Fraction of the run in which the budget rises."""
    attack_steps: Count = 3
    """Steps of the attack, each of 2 eps / attack_steps, so that they reach across the ball."""
    clean: NonNegative = 0.5
    """Weight of the same loss on a quarter of the photos without an attack."""
    crop: FractionRange = (0.5, 0.95)
    """Smallest and largest side of the random crops, as fractions of the photo's; 1,1 crops nothing."""
    cutmix: Fraction | None = None
    """Fraction of the batches in which every photo gets a rectangle of another one.

    Half of them by default for methods without labels; none for others, whose labels it would make wrong.
    """
    average: Annotated[float, Field(ge=0, lt=1)] = 0.998
    """The result is the moving average of the weights with this decay, less in the first steps; 0: the last weights."""
    check_every: Whole = 200
    """Steps between checks on held-out photos; 0 checks nothing and holds nothing out."""
    check_photos: Count = 200
    """Held-out photos; a tenth of all if there are few."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Precision in which the towers compute; the weights are fp32 in either case."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of order, augmentation and attack."""
    half: bool = False
    """Write the finished tower in fp16."""
    save_every: Count = 200
    """Steps between checkpoints."""

    def __post_init__(self) -> None:
        if self.warmup is not None and self.warmup >= self.steps:
            limit = self.steps - 1
            raise ReactClipError(f"warmup is {self.warmup}; it lies in 0 to {limit}, below the {self.steps} steps")

    def rate(self, step: int) -> float:
        """Fraction of the largest learning rate: linear warm-up, then half a cosine to zero; steps count from 0.

        >>> settings = Settings(steps=20, warmup=2)
        >>> [round(settings.rate(step), 4) for step in (0, 1, 2, 11, 19)]
        [0.5, 1.0, 1.0, 0.5, 0.0076]
        """
        warmup = min(100, self.steps // 10) if self.warmup is None else self.warmup
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (self.steps - warmup)))

    def budget(self, step: int) -> float:
        """The attack's largest change of a pixel at a step.

        >>> settings = Settings(steps=10, eps_start=0.25, eps=0.75, ramp=0.4)
        >>> [settings.budget(step) for step in (0, 2, 4, 9)]
        [0.25, 0.5, 0.75, 0.75]
        """
        risen = min(1.0, step / (self.ramp * self.steps)) if self.ramp else 1.0
        return self.eps_start + (self.eps - self.eps_start) * risen

    def identity(self) -> dict[str, Any]:
        """The fields that decide the outcome, as JSON values: all but ``save_every``."""
        return {name: value for name, value in self.to_dict().items() if name != "save_every"}
