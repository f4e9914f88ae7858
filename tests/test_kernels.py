"""Triton kernels against plain PyTorch: on a GPU, and without one in Triton's interpreter, in a process of its own."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import react_clip as rc
from react_clip import augment, kernels, noise
from react_clip.encoders import layers
from react_clip.encoders.base import CLIP_MEAN, CLIP_STD
from react_clip.encoders.vision import QuickGELU
from toys import on_a_gpu, patch_encoder

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
compiled_or_interpreted = pytest.mark.skipif(not (GPU or INTERPRETED), reason="needs a GPU or Triton's interpreter")
VIEWS = ("noisy_view", "normalised", "smaller_copy", "moved", "hash_sums")
# The interpreter computes with NumPy, which has no bf16, and slowly.
half_precision = pytest.mark.parametrize("dtype", [torch.float16, *([torch.bfloat16] if GPU else [])])


@pytest.mark.skipif(GPU or find_spec("triton") is None, reason="needs Triton, and no GPU")
def test_kernels_agree_with_pytorch_in_the_interpreter() -> None:
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            __file__,
            "-k",
            "kernel_agrees",
        ],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
    assert "skipped" not in run.stdout, run.stdout[-1000:]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@compiled_or_interpreted
@pytest.mark.parametrize("size", [5, 32, *([224] if GPU else [])])
def test_the_noise_kernel_agrees(size: int) -> None:
    for count in (0, 1, 7, *([100] if GPU else [])):
        pixels, keys = torch.rand(count, 3, size, size, device=DEVICE), torch.arange(count, device=DEVICE) * -977
        sigma = torch.linspace(0.0, 0.5, count, device=DEVICE)
        views = kernels.noisy_view(pixels, keys, sigma)
        assert torch.allclose(views, noise.noisy_view(pixels, keys, sigma), rtol=0, atol=1e-6)


@compiled_or_interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, *([torch.bfloat16] if GPU else [])])
def test_the_pixel_normalisation_kernel_agrees(dtype: torch.dtype) -> None:
    for count, size in ((1, 5), (3, 32), (2, 50), *([(64, 224)] if GPU else [])):
        pixels = torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(0)).to(DEVICE)
        mean, std = (torch.tensor(each, device=DEVICE).view(1, 3, 1, 1) for each in (CLIP_MEAN, CLIP_STD))
        found = kernels.normalised(pixels.transpose(2, 3), mean, std, dtype)
        assert torch.equal(found, ((pixels.transpose(2, 3) - mean) / std).to(dtype))


@compiled_or_interpreted
@pytest.mark.parametrize(("side", "size"), [(32, 24), (32, 8), (33, 32), *([(224, 176), (224, 160)] if GPU else [])])
def test_the_resize_kernel_agrees(side: int, size: int) -> None:
    pixels = torch.rand(2, 3, side, side, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    for each in (pixels, pixels[1:, :, :, :].transpose(2, 3)):
        copies = kernels.smaller_copy(each, size)
        # PyTorch computes its weights on the GPU in fp32, which rounds them by 1e-5.
        assert torch.allclose(copies, augment.smaller_copy(each, size), rtol=0, atol=5e-5 if GPU else 1e-6)


@compiled_or_interpreted
@pytest.mark.parametrize("hashes", [False, True])
@pytest.mark.parametrize("size", [32, *([224] if GPU else [])])
def test_the_motion_kernel_agrees(size: int, hashes: bool) -> None:
    pixels = torch.rand(3, 3, size, size, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    pixels[0, 0, :4] = -0.0
    seeds = torch.tensor([7, -(2**62), 2**61 + 5], device=DEVICE)
    sums = kernels.hash_sums(pixels, noise.hash_weights(pixels[0].numel(), pixels.device)) if hashes else None
    for branch, motion in ((0, augment.Motion()), (1, augment.Motion(rotation=40.0, translation=0.3))):
        keys = noise.keys_of_seeds(pixels, seeds) if hashes else seeds
        exact = motion(pixels, noise.fork(keys, branch))
        found = kernels.moved(
            *(pixels, seeds, sums),
            branch=branch,
            rotation=math.radians(motion.rotation),
            translation=motion.translation,
            scale=motion.scale,
        )
        # A coordinate of 224 pixels has a rounding error of 1e-5, and so has what is read there.
        assert torch.allclose(found, exact, rtol=0, atol=1e-4)


@compiled_or_interpreted
@half_precision
@pytest.mark.parametrize(("rows", "width", "hidden"), [(1, 32, 64), (300, 136, 520), (4_200, 64, 264)])
def test_the_linear_kernel_agrees(
    dtype: torch.dtype, rows: int, width: int, hidden: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if GPU and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("this GPU has no TMA")
    monkeypatch.setattr(layers, "_multiprocessors", lambda device: 3)  # some programs compute several tiles
    layer = nn.Linear(width, hidden).requires_grad_(requires_grad=False)
    layer.weight.copy_(normal(hidden, width, seed=1).cpu() / width**0.5)
    layer.bias.copy_(normal(hidden, seed=2).cpu())
    layer.to(DEVICE, dtype)
    tokens = normal(2, rows, width, seed=3).to(dtype)
    found = layers.FusedQuickGELU(layer, QuickGELU())._fused(tokens)
    exact = QuickGELU()(nn.functional.linear(tokens.double(), layer.weight.double(), layer.bias.double()))
    assert found.dtype == dtype
    assert torch.allclose(found.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-4)


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_activation_kernel_has_the_bits_of_pytorch(dtype: torch.dtype) -> None:
    for count in (1, 7, 5_000):
        hidden = 5.0 * normal(count, 303, seed=count).to(dtype)
        assert torch.equal(layers._quick_gelu(hidden), QuickGELU()(hidden))


@compiled_or_interpreted
@half_precision
def test_the_normalisation_kernel_agrees(dtype: torch.dtype) -> None:
    for rows, width in ((1, 12), (7, 768), *([(5_000, 1024)] if GPU else [])):
        norm = layers.AddNorm(width).requires_grad_(requires_grad=False)
        for seed, parameter in enumerate(norm.parameters()):
            parameter.copy_(normal(width, seed=seed).cpu())
        norm.to(DEVICE, dtype)
        tokens, update = (normal(2, rows, width, seed=3) * 3.0 + 1.0).to(dtype)
        for images, added in ((tokens, update), (tokens.expand(3, -1, -1).contiguous(), update), (tokens, None)):
            total, normalised = norm(images, added)
            fused_total, fused = norm._fused(images, added)
            assert torch.equal(total, fused_total)
            assert torch.allclose(normalised, fused, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)


@pytest.mark.parametrize("source", ["offline", "transformers"])
def test_fused_layers_replace_those_of_any_tower(source: str, tiny_folder: Path) -> None:
    encoder = patch_encoder() if source == "offline" else rc.load(tiny_folder, device="cpu")
    pixels = torch.rand(2, 3, encoder.image_size, encoder.image_size)
    expected, fingerprint = encoder(pixels), encoder.fingerprint()
    for _ in range(2):  # the second time there is nothing left to replace
        layers.fuse_operations(encoder.tower)
    fused = [module for module in encoder.tower.modules() if isinstance(module, layers.FusedQuickGELU)]
    assert len(fused) >= 1
    assert not any(isinstance(module.activation, nn.Identity) for module in fused)
    assert torch.equal(encoder(pixels), expected)
    assert encoder.fingerprint() == fingerprint


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_a_gpu)])
def test_joint_projections_give_the_same_and_stay_joint(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "suit_kernels", lambda *tensors: not kernels.needs_gradients(*tensors))
    torch.manual_seed(0)
    projections = layers.Projections(16).requires_grad_(requires_grad=False).to(device)
    tokens = torch.rand(2, 5, 16, device=device)
    separate = [projections(tokens, tokens), projections(tokens[:, :1], tokens)]
    weights = {name: value.clone() for name, value in projections.state_dict().items()}
    projections.join()
    assert all(torch.equal(value, weights[name]) for name, value in projections.state_dict().items())
    for queries, expected in zip((tokens, tokens[:, :1]), separate, strict=True):
        for found, each in zip(projections(queries, tokens), expected, strict=True):
            assert torch.allclose(found, each, atol=1e-6)
    projections.double()
    joint = projections._joint
    assert joint is not None
    assert joint[0].dtype == torch.float64
    assert projections["q_proj"].weight.data_ptr() == joint[0].data_ptr()
    projections["v_proj"].weight.zero_()  # in place, so the matrix changes too
    assert torch.equal(projections(tokens.double(), tokens.double())[2][0, 0], projections["v_proj"].bias)
    # Replaced: no longer joint.
    projections["q_proj"].weight.data = torch.zeros(16, 16, dtype=torch.float64, device=device)
    assert torch.equal(projections(tokens.double(), tokens.double())[0][0, 0], projections["q_proj"].bias)


@on_a_gpu
def test_a_gpu_uses_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    used: set[str] = set()
    for owner, name in (
        *((kernels, name) for name in VIEWS),
        *((each, "_fused") for each in (layers.FusedQuickGELU, layers.AddNorm)),
    ):
        function = getattr(owner, name)

        def note(*args: object, function=function, label=f"{owner.__name__}.{name}", **more: object) -> object:  # type: ignore[no-untyped-def]
            used.add(label)
            return function(*args, **more)

        monkeypatch.setattr(owner, name, note)
    encoder = patch_encoder().cuda().to(torch.float16).accelerate()
    clf = rc.ZeroShotClassifier.from_features(encoder, list("ab"), torch.eye(2, 12))
    for guard in (rc.ReACT(), rc.SecondLook()):
        guard(clf, torch.rand(200, 3, 32, 32).cuda())
    names = {f"react_clip.kernels.{name}" for name in VIEWS}
    names.add("AddNorm._fused")
    tma = torch.cuda.get_device_capability() >= (9, 0)
    assert used == names | ({"FusedQuickGELU._fused"} if tma else set())
