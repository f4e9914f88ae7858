"""T(x): stays in range, follows its stream, and each part does what it says."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from react_clip import ReactClipError, noise
from react_clip.augment import JitterFirst, WeakAugmentation, _hue_matrices
from toys import toy_images


def test_hue_keeps_the_brightness() -> None:
    pixels = 0.4 + 0.2 * toy_images(2)
    turned = torch.einsum("bij,bjhw->bihw", _hue_matrices(torch.tensor([0.0, 1.0]), 0.02), pixels)
    luma = torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)
    assert torch.allclose((turned * luma).sum(1), (pixels * luma).sum(1), atol=1e-4)
    assert (turned - pixels).abs().max() > 1e-3


def torchvisions(options: WeakAugmentation, image: Tensor, key: int) -> Tensor:
    """One view made by torchvision's functions, without hue; the draws are the same and shifts are not rounded."""
    functions = pytest.importorskip("torchvision.transforms.functional")
    parameters, grain = (noise.fork(torch.tensor([key]), branch) for branch in (0, 1))
    draw = noise.uniform(parameters, 13)[0].double().tolist()
    angle, (small, large) = options.rotation * (2 * draw[0] - 1), options.scale
    zoom = small + (large - small) * draw[3]
    # Ours shifts before the rotation, torchvision after it.
    right, down = (-options.translation * image.shape[-1] * (2 * draw[i] - 1) for i in (1, 2))
    cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    shift = [zoom * (cos * right + sin * down), zoom * (cos * down - sin * right)]
    bilinear = pytest.importorskip("torchvision.transforms").InterpolationMode.BILINEAR
    # With fill=0 torchvision would fade the border twice.
    view = functions.affine(image, -angle, shift, zoom, [0.0, 0.0], interpolation=bilinear, fill=None)
    blurred, noisy, jittered = (draw[i] < options.probability for i in (4, 5, 6))

    def jitter(view: Tensor) -> Tensor:
        brightness, contrast, saturation = (1 + options.jitter * (2 * draw[i] - 1) for i in (9, 10, 11))
        view = functions.adjust_contrast(functions.adjust_brightness(view, brightness), contrast)
        return functions.adjust_saturation(view, saturation)

    first = isinstance(options, JitterFirst)
    if jittered and first:
        view = jitter(view)
    if blurred:
        sigma = options.blur_sigma[0] + (options.blur_sigma[1] - options.blur_sigma[0]) * draw[7]
        view = functions.gaussian_blur(view, [options.blur_kernel] * 2, [sigma] * 2)
    if noisy:
        view = (view + options.noise_sigma * draw[8] * noise.normal(grain, view.shape[1:])).clamp(0, 1)
    return jitter(view) if jittered and not first else view


@pytest.mark.parametrize("kind", [WeakAugmentation, JitterFirst])
def test_it_equals_torchvisions_functions_but_for_hue(kind: type[WeakAugmentation]) -> None:
    augment, image = kind(hue=0.0, jitter=0.4), toy_images(1, dtype=torch.float64)
    keys = range(12)
    views = augment(image.expand(12, -1, -1, -1), torch.tensor(keys))
    # torchvision computes its grey and its kernel from constants of four digits and in single precision.
    for key, view in zip(keys, views, strict=True):
        assert (view - torchvisions(augment, image, key)[0]).abs().max() < 2e-3, key


def test_shared_keys_give_the_same_change_with_noise_of_its_own() -> None:
    images, keys, shared = toy_images(1).expand(4, -1, -1, -1), torch.arange(4), torch.tensor([5, 5, 6, 6])
    views = JitterFirst(probability=1, noise_sigma=0.0)(images, keys, shared)
    assert torch.equal(views[0], views[1])
    assert torch.equal(views[2], views[3])
    assert (views[0] - views[2]).abs().max() > 0.01
    noisy = JitterFirst(probability=1)(images, keys, shared)
    assert (noisy[0] - noisy[1]).abs().max() > 1e-3
    assert (noisy - views).abs().max() < 0.2


def test_a_blur_of_an_even_kernel_is_refused() -> None:
    with pytest.raises(ReactClipError, match="blur_kernel is 4"):
        WeakAugmentation(blur_kernel=4)


def test_every_step_is_differentiable() -> None:
    images = toy_images(2, dtype=torch.float64).requires_grad_()
    augment = WeakAugmentation(probability=1)
    assert torch.autograd.gradcheck(lambda images: augment(images, torch.arange(2)), images, fast_mode=True)
