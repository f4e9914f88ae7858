"""Small encoders for unit tests of shapes and equations. They are never evidence about the defence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from react_clip import Encoder, ZeroShotClassifier
from react_clip.accelerate import Backend, Result
from react_clip.encoders.vision import VisionEncoder, VisionTower

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class ToyEncoder(Encoder):
    """A tiny convolutional net at 16 pixels that counts the views it encodes."""

    def __init__(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        net = nn.Sequential(nn.Conv2d(3, 8, 4, stride=4), nn.GELU(), nn.Flatten(), nn.Linear(128, 12))
        for parameter in net.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * (0.3 if parameter.ndim > 1 else 0.1)
        super().__init__(net.to(dtype), name="toy", image_size=16, dim=12)
        self.encoded = 0
        self.calls = 0
        self.register_buffer("mean", self.mean.to(dtype), persistent=False)
        self.register_buffer("std", self.std.to(dtype), persistent=False)

    def _image_features(self, normalised: Tensor) -> Tensor:
        self.encoded += len(normalised)
        self.calls += 1
        return self.tower(normalised)


class RecordsOnACPU(Backend):
    """Calls functions as a backend with CUDA graphs does, without a GPU, and notes what it would record."""

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self.calls: list[tuple[Any, ...]] = []
        """Function, number of rows and shapes of the arguments."""

    def __call__(
        self,
        function: Callable[..., Result],
        *tensors: Tensor,
        constants: tuple[Tensor, ...] = (),
        rows: Tensor | None = None,
        share: float = 1.0,
    ) -> Result:
        count = len(tensors[0] if rows is None else rows)
        shapes = (*(tensor.shape[1:] for tensor in tensors), *(tensor.shape for tensor in constants))
        self.calls.append((function, count, *shapes))
        return super().__call__(function, *tensors, constants=constants, rows=rows)

    def records(self, rows: int, *tensors: Tensor, share: float = 1.0) -> bool:
        return True


def patch_encoder(dtype: torch.dtype = torch.float32) -> VisionEncoder:
    """A random vision transformer at 32 pixels with 8 x 8 patches; it takes other sizes too."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tower = VisionTower(width=32, hidden=64, layers=2, heads=2, size=32, patch=4, dim=12)
        for name, parameter in tower.named_parameters():
            if parameter.ndim > 1 or "class_embedding" in name:
                nn.init.normal_(parameter, std=0.3)
    encoder = VisionEncoder(tower.to(dtype), name="patches", image_size=32, dim=12, patch_size=4)
    return encoder.to(dtype)


def toy_classifier(dtype: torch.dtype = torch.float32, classes: int = 5) -> ZeroShotClassifier:
    encoder = ToyEncoder(dtype)
    features = torch.randn(classes, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    return ZeroShotClassifier.from_features(encoder, [f"class {i}" for i in range(classes)], features)


def toy_images(count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(count, 3, 16, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def write_photos(folder: Path, count: int = 3) -> Path:
    """Save random photos as ``folder/photo0.png`` and so on; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for i in range(count):
        Image.fromarray(rng.integers(0, 255, (50, 40, 3), np.uint8)).save(folder / f"photo{i}.png")
    return folder
