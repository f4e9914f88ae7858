"""Small encoders, packages and photos for unit tests. They are never evidence about the defence."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from react_clip import Encoder, ZeroShotClassifier
from react_clip.encoders.layers import QUICK_GELU
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
    """A random vision transformer at 32 pixels with 4 x 4 patches; it takes other sizes too."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "class_embedding": (32,),
        "positional_embedding": (65, 32),
        "conv1.weight": (32, 3, 4, 4),
        "proj": (32, 12),
    }
    block = {"attn.in_proj_weight": (96, 32), "attn.in_proj_bias": (96,), "mlp.c_fc.weight": (64, 32)}
    block |= {"attn.out_proj.weight": (32, 32), "attn.out_proj.bias": (32,), "mlp.c_fc.bias": (64,)}
    block |= {"mlp.c_proj.weight": (32, 64), "mlp.c_proj.bias": (32,)}
    shapes |= {f"transformer.resblocks.{layer}.{name}": shape for layer in (0, 1) for name, shape in block.items()}
    weights = {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for norm in ("ln_pre", "ln_post", *(f"transformer.resblocks.{layer}.ln_{n}" for layer in (0, 1) for n in (1, 2))):
        weights |= {f"{norm}.weight": torch.ones(32), f"{norm}.bias": torch.zeros(32)}
    tower = VisionTower.of(weights, heads=2, activation=QUICK_GELU)
    assert tower is not None
    encoder = Encoder(tower.to(dtype), name="patches", image_size=32, dim=12, patch_size=4)
    return encoder.to(dtype)


def toy_classifier(dtype: torch.dtype = torch.float32, classes: int = 5) -> ZeroShotClassifier:
    encoder = ToyEncoder(dtype)
    features = torch.randn(classes, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    return ZeroShotClassifier.from_features(encoder, [f"class {i}" for i in range(classes)], features)


def toy_images(count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(count, 3, 16, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def install(folder: Path, name: str, source: str, entry_points: str) -> None:
    """A package that is installed in a folder: a module, and its entry points."""
    (folder / f"{name}.py").write_text(source)
    (info := folder / f"{name}-1.0.dist-info").mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)


# ---------------------------------------------------------------------- photos and collections of them


def picture(seed: int) -> bytes:
    """A random photo for each seed, as a PNG file."""
    stream = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (36, 44, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def save_photo(path: Path, number: int) -> Path:
    """Write a random photo and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(picture(number))
    return path


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    """Write a tar file with these members."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def read_rows(folder: Path) -> Any:
    """All rows of an output folder as pandas reads them, sorted by key."""
    import pandas as pd

    return pd.read_parquet(folder).sort_values("key").reset_index(drop=True)


def features(rows: Any) -> Any:
    """The features ``[N, dim]`` of the rows without error."""
    return np.stack(rows.feature[rows.error.isna()])


def write_photos(folder: Path, count: int = 3) -> Path:
    """Save random photos as ``folder/photo0.png`` and so on; returns the folder."""
    for number in range(count):
        save_photo(folder / f"photo{number}.png", number)
    return folder
