"""The tiny CLIP, a second one to take towers from, and a few striped photos."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import react_clip as rc
import tiny_clip

CLASSES = 4


@pytest.fixture(scope="package")
def other_openai(other_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The other CLIP's weights in OpenAI's layout, by a conversion that is not ours."""
    return tiny_clip.write_open_clip(other_folder, tmp_path_factory.mktemp("other_openai"))


@pytest.fixture(scope="package")
def encoder(tiny_folder: Path) -> rc.Encoder:
    """The tiny CLIP; tests must not change it."""
    return rc.load(tiny_folder, device="cpu")


@pytest.fixture(scope="package")
def photos() -> tuple[Tensor, Tensor]:
    """Stripes of one direction and width per class, in noise: uint8 pixels and labels."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(24) % CLASSES
    across = torch.arange(tiny_clip.SIZE).float()
    waves = torch.stack([torch.sin(across / (1.5 + label)) for label in range(CLASSES)])
    stripes = torch.stack([wave[None, :].expand(tiny_clip.SIZE, -1) for wave in waves])
    stripes[1::2] = stripes[1::2].transpose(1, 2).clone()
    grain = torch.randn(len(labels), 3, tiny_clip.SIZE, tiny_clip.SIZE, generator=generator)
    return (128 + 60 * stripes[labels][:, None] + 20 * grain).clamp(0, 255).round().to(torch.uint8), labels


@pytest.fixture(scope="package")
def class_features(encoder: rc.Encoder) -> Tensor:
    """Text features of four names."""
    return encoder.encode_text([f"a photo of {name}" for name in ("reed", "brick", "cloth", "sand")])
