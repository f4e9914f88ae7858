"""Models beside OpenAI's load, compute and prepare images as their libraries do, and can be defended."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

import react_clip as rc
import tiny_families
from react_clip.encoders import openclip
from react_clip.encoders.vision import VisionTower
from react_clip.preprocess import Preprocessing

HF = ("siglip", "siglip2", "metaclip_2")
SIZES = ((300, 200), (200, 301), (67, 131), (90, 50), (64, 64))


def photos(count: int, size: int) -> Tensor:
    """Smooth images of different colours."""
    coarse = torch.rand(count, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    return F.interpolate(coarse, size=(size, size), mode="bilinear")


def picture(size: tuple[int, int]) -> Image.Image:
    rng = np.random.default_rng(0)
    return Image.fromarray(rng.integers(0, 255, (size[1], size[0], 3), np.uint8))


@pytest.fixture(scope="module", params=HF)
def hf_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Tests read the family from the name; mktemp would add a number, which grows when a worker makes the fixture again.
    (folder := tmp_path_factory.mktemp("family") / request.param).mkdir()
    return tiny_families.write_hf(folder, request.param)


def library_inputs(kind: str, normalised: Tensor) -> dict[str, Any]:
    """What the library's own model takes for square images."""
    if kind != "siglip2":
        return {"pixel_values": normalised}
    side = normalised.shape[-1] // tiny_families.PATCH
    rows = F.unfold(normalised, tiny_families.PATCH, stride=tiny_families.PATCH).transpose(1, 2)
    # `unfold` puts channels first in a patch, the model expects them last.
    patches = rows.unflatten(2, (3, -1)).transpose(2, 3).flatten(2)
    mask, shapes = torch.ones(patches.shape[:2]).long(), torch.full((len(patches), 2), side)
    return {"pixel_values": patches, "pixel_attention_mask": mask, "spatial_shapes": shapes}


def test_transformers_models_give_the_logits_and_views_of_their_library(hf_folder: Path) -> None:
    from transformers import AutoModel

    encoder, model = rc.load(hf_folder, device="cpu"), AutoModel.from_pretrained(hf_folder).eval()
    kind, pixels, prompts = hf_folder.name, photos(4, encoder.image_size), ["a photo of a cat.", "dog"]
    clf = rc.ZeroShotClassifier.from_features(encoder, ["cat", "dog"], encoder.encode_text(prompts))
    siglip = kind != "metaclip_2"
    padding = {"padding": "max_length", "max_length": 16} if siglip else {"padding": True}
    tokens = encoder.text.tokenizer(prompts, return_tensors="pt", **padding)
    text = {"input_ids": tokens["input_ids"]} | ({} if siglip else {"attention_mask": tokens["attention_mask"]})
    with torch.no_grad():
        expected = model(**text, **library_inputs(kind, (pixels - encoder.mean) / encoder.std)).logits_per_image
        views = photos(3, 48)
        inputs = library_inputs(kind, (views - encoder.mean) / encoder.std)
        inputs |= {} if kind == "siglip2" else {"interpolate_pos_encoding": True}
        features = model.get_image_features(**inputs)
    out = rc.Undefended()(clf, pixels)
    assert (out.logits - expected).abs().max() < 1e-3
    assert (expected[0] - expected[1]).abs().max() > 0.1, "a model that answers all images alike proves nothing"
    assert (out.probs - (expected.sigmoid() if siglip else expected.softmax(-1))).abs().max() < 1e-4
    features = getattr(features, "pooler_output", features)
    assert (encoder.encode(views) - F.normalize(features)).abs().max() < 1e-5
    assert encoder.token_fraction(48) == pytest.approx(36 / 64 if siglip else 37 / 65)
    assert isinstance(encoder.tower, VisionTower) is not siglip


@pytest.mark.parametrize("file", ["preprocessor_config.json", "processor_config.json"])
def test_transformers_models_prepare_images_as_their_processor(hf_folder: Path, tmp_path: Path, file: str) -> None:
    import transformers

    name = hf_folder.name
    processor_config = tiny_families.PROCESSORS[name] | {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4]}
    for path in hf_folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "preprocessor_config.json").unlink()
    whole = processor_config if file.startswith("pre") else {"image_processor": processor_config}  # transformers 5
    (tmp_path / file).write_text(json.dumps(whole))
    encoder = rc.load(tmp_path, device="cpu")
    assert torch.allclose(encoder.std.flatten(), torch.tensor([0.2, 0.3, 0.4]))
    kind = processor_config["image_processor_type"]
    processor = getattr(transformers, f"{kind}Pil", getattr(transformers, kind)).from_pretrained(tmp_path)
    # NaFlex keeps the aspect of an image: only squares are prepared alike.
    for size in ((64, 64), (100, 100), (33, 33)) if name == "siglip2" else SIZES:
        pixels = encoder.prepare([picture(size)])
        ours = library_inputs(name, (pixels - encoder.mean) / encoder.std)["pixel_values"]
        theirs = processor(images=[picture(size)], return_tensors="pt")["pixel_values"]
        assert theirs.shape == ours.shape
        assert (ours - theirs).abs().max() < 1e-5, size


@pytest.mark.parametrize("mode", ["shortest", "longest", "squash"])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_open_clip_models_prepare_images_as_their_transform(
    open_clip_weights: Path, mode: str, interpolation: str
) -> None:
    import open_clip

    model = open_clip.create_model("tiny-test-clip", pretrained=str(open_clip_weights))
    model.visual.preprocess_cfg |= {"resize_mode": mode, "interpolation": interpolation, "fill_color": 7}
    encoder = openclip.wrap_model(model, name="tiny", dim=32, tokenizer=None)
    config = open_clip.transform.PreprocessCfg(**open_clip.get_model_preprocess_cfg(model))
    transform = open_clip.transform.image_transform_v2(config, is_train=False)
    for size in SIZES:
        ours = (encoder.prepare([picture(size)])[0] - encoder.mean[0]) / encoder.std[0]
        assert (ours - transform(picture(size))).abs().max() < 1e-5, size


def test_towers_without_a_processor_prepare_images_as_the_paper(tiny_folder: Path) -> None:
    assert rc.load(tiny_folder, device="cpu").preprocessing == Preprocessing.paper(32) == Preprocessing(32, 37)


def test_transformers_models_are_defended_and_calibrated(hf_folder: Path) -> None:
    check_defended(rc.load(hf_folder, device="cpu"), smaller=True)


@pytest.mark.parametrize("family", tiny_families.OPEN_CLIP)
def test_open_clip_models_are_defended_and_calibrated(family: str, tmp_path: Path) -> None:
    import open_clip

    name = tiny_families.write_open_clip(tmp_path, family)
    encoder = rc.load(name, device="cpu")
    model_name, weights = name.removeprefix("open_clip:").split("/", 1)
    model = open_clip.create_model(model_name, pretrained=weights).eval()
    pixels = photos(3, encoder.image_size)
    with torch.no_grad():
        expected = model.encode_image((pixels - encoder.mean) / encoder.std, normalize=True)
    assert (encoder(pixels) - expected).abs().max() < 1e-5
    assert encoder.similarity.sigmoid == (family == "sigmoid")
    assert isinstance(encoder.tower, VisionTower) is family.startswith("vit")
    check_defended(encoder, smaller=family.startswith("vit"))


def check_defended(encoder: rc.Encoder, *, smaller: bool) -> None:
    """Both defences answer, and SecondLook calibrates; a model of one size warns that its copies are not smaller."""
    pixels = photos(20, encoder.image_size)
    clf = rc.ZeroShotClassifier.from_features(encoder, ["cat", "dog"], torch.eye(2, encoder.dim))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        # Features of random weights move a lot; a threshold that half of the photos pass is still below the limit.
        guard = rc.SecondLook.calibrate(clf, pixels, clean_pass=0.5).config
    assert any("takes one image size only" in str(warning.message) for warning in said) is not smaller
    out = guard(clf, pixels[:4], seed=0)
    assert out.drift.min() > 0
    assert torch.allclose(out.features.norm(dim=1), torch.ones(4), atol=1e-5)
    paper = rc.ReACT(tau=None, views=2)(clf, pixels[:2], seed=0)
    assert bool(paper.gated.all())
