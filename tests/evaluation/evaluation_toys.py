"""A toy CLIP and toy photos for tests of the runner. They are never evidence about a defence.

Each class is a random pattern of half a grey level, buried in noise; the encoder is the matched filter. Most photos are
classified rightly, and 1/255 in the right direction breaks them. With ``amplitude=20`` nothing small can.

As a program it evaluates the toy into a folder.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image
from torch import Tensor, nn

import react_clip as rc
from react_clip.attacks import Adaptive, Queries, Suite, Transfer
from react_clip.encoders import Encoder
from react_clip.evaluation import EvaluationResult, Recipe, evaluate

SIZE, CLASSES, COUNT = 32, 5, 40
NAMES = [f"class {number}" for number in range(CLASSES)]


def patterns() -> Tensor:
    return torch.randn(CLASSES, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(3)).sign()


class ToyEncoder(Encoder):
    """The matched filter of the patterns, as a convolution that covers the image."""

    def __init__(self) -> None:
        tower = nn.Sequential(nn.Conv2d(3, CLASSES, SIZE, bias=False), nn.Flatten())
        tower[0].weight.data = patterns() / SIZE
        super().__init__(tower, name="toy", image_size=SIZE, dim=CLASSES, mean=(0.5,) * 3, std=(1.0,) * 3)


def toy_classifier(names: Sequence[str] = NAMES) -> rc.ZeroShotClassifier:
    return rc.ZeroShotClassifier.from_features(ToyEncoder(), names, torch.eye(CLASSES))


def toy_photos(count: int = COUNT, amplitude: float = 0.5, noise: float = 14.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """uint8-valued photos as floats in [0, 1], and their labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % CLASSES
    grain = torch.randn(count, 3, SIZE, SIZE, generator=generator)
    return (127.5 + amplitude * patterns()[labels] + noise * grain).round().clamp(0, 255) / 255, labels


def toy_defenses() -> list[Any]:
    return [rc.Undefended(), rc.ReACT(tau=0.3, views=3)]


def toy_attacks() -> list[Any]:
    return [rc.attacks.PGD(eps=1 / 255, steps=10), rc.attacks.PGD(eps=4 / 255, steps=3)]


def toy_run(folder: Path, **options: Any) -> EvaluationResult:
    settings: dict[str, Any] = {"attacks": toy_attacks(), "batch": 8, "progress": False, "seeds": (0, 1), **options}
    data = settings.pop("data", None) or toy_photos()
    defenses = settings.pop("defenses", None) or toy_defenses()
    return evaluate(toy_classifier(settings.pop("names", NAMES)), defenses, data, run_dir=folder, **settings)


def part_of(result: EvaluationResult, label: str) -> EvaluationResult:
    """The result as if only one of its defences had been evaluated."""
    return dataclasses.replace(
        result,
        recipe={**result.recipe, "defenses": [item for item in result.recipe["defenses"] if item["label"] == label]},
        images=result.images[result.images["defense"] == label],
        checks=tuple(check for check in result.checks if check.defense == label),
    )


def numbers(result: EvaluationResult) -> str:
    """All of a result except when it was made; as text, in which NaN equals NaN."""
    return repr({**result.to_dict(), "created": ""})


GUARDS = {"ReACT": rc.ReACT(tau=0.3, views=2), "AOM": rc.defenses.AOM(views=2)}
MEMBERS = (
    Transfer(steps=4),
    Adaptive(objective="both", steps=6, eot=1, checkpoint=False),
    Adaptive(objective="evade", steps=8, eot=2, lambdas=(1.0,), checkpoint=False),
    Queries(queries=6, eot=1),
)


def suites(*budgets: int) -> list[Any]:
    return [Suite(eps=eps / 255, members=MEMBERS) for eps in budgets]


def adaptive_run(folder: Path, **options: Any) -> EvaluationResult:
    settings: dict[str, Any] = {"attacks": suites(1, 4), "threat": "adaptive", "defenses": GUARDS, "seeds": (0, 1)}
    return toy_run(folder, **{**settings, "data": toy_photos(16), **options})


class ToyText:
    """Understands prompts about the toy's own classes, and nothing else."""

    def encode(self, prompts: Sequence[str]) -> Tensor:
        numbers = [int("".join(letter for letter in prompt if letter.isdigit())) for prompt in prompts]
        return torch.eye(CLASSES)[numbers]


def toy_with_text() -> ToyEncoder:
    encoder: Any = ToyEncoder()
    encoder._text = ToyText()
    return encoder


def write_photos(root: Path, name: str, split: str = "test", count: int = 20, seed: int = 0) -> None:
    """Toy photos in the folder layout, as PNG of the encoder's own size, hence pixel for pixel."""
    pixels, labels = toy_photos(count, seed=seed)
    for number, (photo, label) in enumerate(zip(pixels, labels.tolist(), strict=True)):
        place = root / name / split / f"class_{label}"
        place.mkdir(parents=True, exist_ok=True)
        array = photo.mul(255).round().byte().permute(1, 2, 0).numpy()
        Image.fromarray(array).save(place / f"{number:03d}.png")


ADAPTIVE = """
model: toy
datasets: [toys]
threat: adaptive
attacks:
  - {kind: adaptive, objective: both, eps: [1/255, 4/255], steps: 20, eot: 4}
  - {kind: adaptive-suite, eps: 4/255, members: [adaptive, {kind: adaptive, objective: evade, lambdas: [1, 10]}]}
defenses: [{kind: react, calibrated: false}, defend-clip]
"""


def adaptive_recipe(**changes: Any) -> Recipe:
    """A recipe whose attacker knows the defence, with some keys changed."""
    return Recipe.from_dict({**yaml.safe_load(ADAPTIVE), **changes})


def write_head(path: Path, classes: int = CLASSES, dim: int = CLASSES, name: str = "class") -> None:
    folders = [f"{name}_{number}" for number in range(classes)]
    names = [folder.replace("_", " ") for folder in folders]
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, names=names, folders=folders, features=torch.eye(max(classes, dim))[:classes, :dim].numpy())


if __name__ == "__main__":
    toy_run(Path(sys.argv[1]))
