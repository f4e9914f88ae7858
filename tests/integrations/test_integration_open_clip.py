"""The defended open_clip model beside the model itself and beside our own guard."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

import react_clip as rc
import tiny_clip
from react_clip.integrations import DefendedOpenCLIP, drift_only
from react_clip.integrations.open_clip import to_unit_range

from .conftest import CLOSED, OPEN, check_refusals

LABELS = ["cat", "dog", "teapot"]


@pytest.fixture(scope="module")
def made(open_clip_weights: Path) -> tuple[Any, Any]:
    """A model and its preprocessing, as open_clip's users make them."""
    import open_clip

    model, _, preprocess = open_clip.create_model_and_transforms(
        tiny_clip.OPEN_CLIP_NAME, pretrained=str(open_clip_weights), device="cpu"
    )
    return model.eval(), preprocess


@pytest.fixture(scope="module")
def tokenizer(open_clip_weights: Path) -> Any:
    import open_clip

    return open_clip.get_tokenizer(tiny_clip.OPEN_CLIP_NAME)


def batch(preprocess: Any, photos: list[Path]) -> Tensor:
    return torch.stack([preprocess(Image.open(path)) for path in photos])


def test_a_closed_guard_is_the_model_itself(made: Any, tokenizer: Any, photos: list[Path]) -> None:
    model, preprocess = made
    images, tokens = batch(preprocess, photos), tokenizer(LABELS)
    with torch.no_grad():
        plain, unit = model.encode_image(images), model.encode_image(images, normalize=True)
        text, forward = model.encode_text(tokens), model(images, tokens)
        defended = DefendedOpenCLIP(model, drift_only(CLOSED, tau=1e9))
        assert torch.allclose(defended.encode_image(images), plain, atol=1e-5, rtol=1e-5)
        assert torch.allclose(defended.encode_image(images, normalize=True), unit, atol=1e-6)
        assert torch.equal(defended.encode_text(tokens), text)
        for ours, theirs in zip(defended(images, tokens), forward, strict=True):
            assert torch.allclose(ours, theirs, atol=1e-5)
        assert [part is None for part in defended(text=tokens)] == [True, False, False]
        model.output_dict = True
        assert set(defended(text=tokens)) == {"image_features", "text_features", "logit_scale"}
        model.output_dict = False


def test_an_open_guard_gives_the_features_of_rc(
    made: Any, tokenizer: Any, open_clip_name: str, fitting: list[Path]
) -> None:
    model, preprocess = made
    encoder = rc.load(open_clip_name, device="cpu")
    # Photos of the encoder's size: both preprocessings leave them alone, so the pixels are the same ones.
    pixels = encoder.prepare(fitting)
    expected = OPEN(rc.ZeroShotClassifier(encoder, LABELS), pixels, seed=5)
    assert expected.gated.all()
    images = batch(preprocess, fitting)
    assert torch.equal(to_unit_range(images, encoder.mean, encoder.std), pixels)
    labelled = DefendedOpenCLIP(model, OPEN, labels=LABELS, tokenizer=tokenizer, seed=5)
    assert torch.allclose(labelled.encode_image(images, normalize=True), expected.features, atol=1e-6)
    assert not torch.allclose(model.encode_image(images, normalize=True), expected.features, atol=1e-3)
    assert torch.allclose(labelled.encode_image(images).norm(dim=1), model.encode_image(images).norm(dim=1), rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_pixels_come_back_exactly(dtype: torch.dtype) -> None:
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073]).view(1, 3, 1, 1)
    std = torch.tensor([0.26862954, 0.26130258, 0.27577711]).view(1, 3, 1, 1)
    pixels = (torch.arange(256.0) / 255).view(1, 1, 16, 16).repeat(1, 3, 1, 1)
    back = to_unit_range(((pixels - mean) / std).to(dtype), mean, std)
    # bf16 cannot tell neighbouring bytes apart; the others can.
    assert torch.equal(back, pixels) if dtype != torch.bfloat16 else torch.allclose(back, pixels, atol=0.01)
    between = pixels * 0.999 + 0.0003
    back = to_unit_range((between - mean) / std, mean, std)
    assert torch.allclose(back, between, atol=1e-6)
    assert not torch.equal(back, pixels)


def test_gradients_and_precision_are_the_models(
    made: Any, open_clip_weights: Path, tokenizer: Any, fitting: list[Path]
) -> None:
    import open_clip

    model, preprocess = made
    images = batch(preprocess, fitting[:1]).requires_grad_()
    DefendedOpenCLIP(model, drift_only(OPEN, tau=-1.0)).encode_image(images, normalize=True)[:, 0].sum().backward()
    assert images.grad is not None
    assert float(images.grad.abs().sum()) > 0
    model, _, preprocess = open_clip.create_model_and_transforms(
        tiny_clip.OPEN_CLIP_NAME, pretrained=str(open_clip_weights), precision="pure_bf16", device="cpu"
    )
    defended = DefendedOpenCLIP(model, drift_only(OPEN))
    images = batch(preprocess, fitting).bfloat16()
    assert (defended.encode_image(images) @ defended.encode_text(tokenizer(LABELS)).T).dtype == torch.bfloat16


def test_errors_are_one_line(made: Any, fitting: list[Path]) -> None:
    model, preprocess = made
    images = batch(preprocess, fitting)
    defended = DefendedOpenCLIP(model, drift_only(OPEN))
    mixed = copy.deepcopy(model)
    mixed.visual.half()
    check_refusals(
        (lambda: defended.encode_image(images * 255), "not \\[0, 1\\]; give what open_clip's preprocess returns"),
        (lambda: defended.encode_image(images * torch.nan), "not \\[0, 1\\]"),
        (lambda: defended.encode_image((images * 50).to(torch.uint8)), "dtype torch.uint8"),
        (lambda: defended.encode_image(images[:, :, :16]), "pixels have shape"),
        (lambda: DefendedOpenCLIP(model, OPEN), "there are no classes"),
        (lambda: DefendedOpenCLIP(model, OPEN, labels=LABELS), "labels need the model's tokenizer"),
        (lambda: DefendedOpenCLIP(torch.nn.Linear(2, 2), OPEN), "lacks encode_image"),
        (lambda: DefendedOpenCLIP(mixed, drift_only(OPEN)), "the model mixes"),
    )
    with pytest.warns(UserWarning, match="takes images that CLIP's normalisation made"):
        defended.encode_image(torch.rand_like(images))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        defended.encode_image(images)
