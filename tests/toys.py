"""Small encoders for unit tests of shapes and equations. They are never evidence about the defence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from react_clip import Encoder, ZeroShotClassifier
from react_clip.encoders.vision import VisionTower

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
        self.tower.register_forward_hook(self._note)

    def _note(self, _tower: nn.Module, _inputs: object, features: Tensor) -> None:
        self.encoded += len(features)
        self.calls += 1


def patch_encoder(dtype: torch.dtype = torch.float32) -> Encoder:
    """A random vision transformer at 32 pixels with 8 x 8 patches; it takes other sizes too."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tower = VisionTower(width=32, hidden=64, depth=2, heads=2, size=32, patch=4, dim=12)
        for name, parameter in tower.named_parameters():
            if parameter.ndim > 1 or "class_embedding" in name:
                nn.init.normal_(parameter, std=0.3)
    encoder = Encoder(tower.to(dtype), name="patches", image_size=32, dim=12, patch_size=4)
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
