"""A toy CLIP and toy photos for tests of the runner. They are never evidence about a defence.

Each class is a random pattern of half a grey level, buried in noise; the encoder is the matched filter. Most photos are
classified rightly, and 1/255 in the right direction breaks them. With ``amplitude=20`` nothing small can.

As a program it evaluates the toy into a folder, so that tests can kill it, race it and starve it of disk.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

import react_clip as rc
from react_clip.encoders import Encoder
from react_clip.evaluation import EvaluationResult, Recipe, evaluate, yaml_text

SIZE, CLASSES, COUNT = 32, 5, 40


def patterns() -> Tensor:
    return torch.randn(CLASSES, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(3)).sign()


class ToyEncoder(Encoder):
    """The matched filter of the patterns, as a convolution that covers the image."""

    def __init__(self, pause: float = 0.0) -> None:
        tower = nn.Conv2d(3, CLASSES, SIZE, bias=False)
        tower.weight.data = patterns() / SIZE
        super().__init__(
            tower, name="toy", image_size=SIZE, dim=CLASSES, mean=(0.5,) * 3, std=(1.0,) * 3, has_text=False
        )
        self.pause = pause

    def _image_features(self, normalised: Tensor) -> Tensor:
        time.sleep(self.pause)
        features: Tensor = self.tower(normalised).flatten(1)
        return features

    def _text_features(self, prompts: list[str]) -> Tensor:
        raise AssertionError("a toy reads no text")


def toy_classifier(pause: float = 0.0) -> rc.ZeroShotClassifier:
    names = [f"class {number}" for number in range(CLASSES)]
    return rc.ZeroShotClassifier.from_features(ToyEncoder(pause), names, torch.eye(CLASSES))


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


def toy_run(folder: Path, pause: float = 0.0, **options: Any) -> EvaluationResult:
    settings: dict[str, Any] = {"attacks": toy_attacks(), "batch": 8, "progress": False, "draws": 2, **options}
    data = settings.pop("data", None) or toy_photos()
    defenses = settings.pop("defenses", None) or toy_defenses()
    return evaluate(toy_classifier(pause), defenses, data, run_dir=folder, **settings)


class ToyWithText(ToyEncoder):
    """A toy that understands prompts about its own classes, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.has_text = True

    def _text_features(self, prompts: list[str]) -> Tensor:
        numbers = [int("".join(letter for letter in prompt if letter.isdigit())) for prompt in prompts]
        return torch.eye(CLASSES)[numbers]


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
  - {kind: adaptive-both, eps: [1/255, 4/255], steps: 20, eot: 4}
  - {kind: adaptive-suite, eps: 4/255, members: [adaptive-through, {kind: adaptive-evade, lambdas: [1, 10]}]}
defenses: [react, defend-clip]
"""


def adaptive_recipe(**changes: Any) -> Recipe:
    """A recipe whose attacker knows the defence, with some keys changed."""
    return Recipe.from_dict({**yaml_text.parse_mapping(ADAPTIVE), **changes})


def write_head(path: Path, classes: int = CLASSES, dim: int = CLASSES, name: str = "class") -> None:
    folders = [f"{name}_{number}" for number in range(classes)]
    names = [folder.replace("_", " ") for folder in folders]
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, names=names, folders=folders, features=torch.eye(max(classes, dim))[:classes, :dim].numpy())


# ---------------------------------------------------------------------- as a program


def child(folder: Path, limit: int | None = None, pause: float = 0.01) -> int:
    """Fork; the child evaluates the toy slowly enough to be interrupted, and exits with 0 or 2."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        toy_run(folder, pause)
        code = 0
    except rc.ReactClipError as error:
        print(f"refused: {error}", file=sys.stderr, flush=True)
        code = 2
    finally:
        os._exit(code)


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill_until_done(folder: Path, kills: int) -> int:
    """Kill that many children at random moments, then let one finish."""
    moments = random.Random(0)
    for _ in range(kills):
        pid = child(folder)
        time.sleep(moments.uniform(0.02, 0.35))
        os.kill(pid, signal.SIGKILL)
        print("ended", exit_code(pid))
    return exit_code(child(folder))


def race(folder: Path) -> int:
    """Two at once: one must win and one must be refused."""
    codes = sorted(exit_code(pid) for pid in [child(folder, pause=0.02) for _ in range(2)])
    print("codes", *codes)
    return 0 if codes == [0, 2] else 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    mode, place = sys.argv[1], Path(sys.argv[2])
    if mode == "kill":
        sys.exit(kill_until_done(place, int(sys.argv[3])))
    if mode == "race":
        sys.exit(race(place))
    sys.exit(exit_code(child(place, limit=int(sys.argv[3]))))
