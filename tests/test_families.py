"""Models beside CLIP's vision transformer load, defend and calibrate, and prepare images as their libraries do."""

from __future__ import annotations

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
from programs import Run
from react_clip.encoders import openclip
from react_clip.encoders.loading import resolve_device
from react_clip.encoders.vision import ViTEncoder
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


def library_inputs(model: Any, normalised: Tensor) -> dict[str, Tensor]:
    """What the library's own model takes for square images."""
    if model.config.model_type != "siglip2":
        return {"pixel_values": normalised}
    side = normalised.shape[-1] // tiny_families.PATCH
    rows = F.unfold(normalised, tiny_families.PATCH, stride=tiny_families.PATCH).transpose(1, 2)
    # `unfold` puts channels first in a patch, the model expects them last.
    patches = rows.unflatten(2, (3, -1)).transpose(2, 3).flatten(2)
    mask, shapes = torch.ones(patches.shape[:2]).long(), torch.full((len(patches), 2), side)
    return {"pixel_values": patches, "pixel_attention_mask": mask, "spatial_shapes": shapes}


def test_transformers_models_give_the_logits_of_their_library(hf_folder: Path) -> None:
    from transformers import AutoModel

    encoder, model = rc.load(hf_folder, device="cpu"), AutoModel.from_pretrained(hf_folder).eval()
    pixels, prompts = photos(4, encoder.image_size), ["a photo of a cat.", "dog"]
    clf = rc.ZeroShotClassifier.from_features(encoder, ["cat", "dog"], encoder.encode_text(prompts))
    siglip = "siglip" in model.config.model_type
    padding = {"padding": "max_length", "max_length": 16} if siglip else {"padding": True}
    tokens = encoder.text.tokenizer(prompts, return_tensors="pt", **padding)
    text = {"input_ids": tokens["input_ids"]} | ({} if siglip else {"attention_mask": tokens["attention_mask"]})
    with torch.no_grad():
        expected = model(**text, **library_inputs(model, (pixels - encoder.mean) / encoder.std)).logits_per_image
    out = rc.Undefended()(clf, pixels)
    assert (out.logits - expected).abs().max() < 1e-3
    assert (expected[0] - expected[1]).abs().max() > 0.1, "a model that answers all images alike proves nothing"
    probabilities = expected.sigmoid() if siglip else expected.softmax(-1)
    assert (out.probs - probabilities).abs().max() < 1e-4


def test_transformers_models_take_a_second_size_as_their_library_does(hf_folder: Path) -> None:
    from transformers import AutoModel

    encoder, model = rc.load(hf_folder, device="cpu"), AutoModel.from_pretrained(hf_folder).eval()
    views = photos(3, 48)
    inputs = library_inputs(model, (views - encoder.mean) / encoder.std)
    if model.config.model_type != "siglip2":
        inputs["interpolate_pos_encoding"] = True
    with torch.no_grad():
        expected = model.get_image_features(**inputs)
    expected = getattr(expected, "pooler_output", expected)
    assert (encoder.encode_views(views) - F.normalize(expected)).abs().max() < 1e-5
    patches = 36 / 64 if "siglip" in model.config.model_type else 37 / 65
    assert encoder.token_share(48) == pytest.approx(patches)


def test_transformers_models_prepare_images_as_their_processor(hf_folder: Path) -> None:
    import transformers

    encoder = rc.load(hf_folder, device="cpu")
    name = hf_folder.name
    kind = tiny_families.PROCESSORS[name]["image_processor_type"]
    processor = getattr(transformers, f"{kind}Pil", getattr(transformers, kind)).from_pretrained(hf_folder)
    # NaFlex keeps the aspect of an image: only squares are prepared alike.
    sizes = ((64, 64), (100, 100), (33, 33)) if name == "siglip2" else SIZES
    for size in sizes:
        pixels = encoder.prepare([picture(size)])
        ours = (pixels - encoder.mean) / encoder.std
        theirs = processor(images=[picture(size)], return_tensors="pt")["pixel_values"]
        if name == "siglip2":
            ours = library_inputs(type("M", (), {"config": type("C", (), {"model_type": name})}), ours)["pixel_values"]
        assert theirs.shape == ours.shape
        assert (ours - theirs).abs().max() < 1e-5, size


@pytest.mark.parametrize("mode", ["shortest", "longest", "squash"])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_open_clip_models_prepare_images_as_their_transform(open_clip_name: str, mode: str, interpolation: str) -> None:
    import open_clip

    model: Any = rc.load(open_clip_name, device="cpu").tower
    model.visual.preprocess_cfg |= {"resize_mode": mode, "interpolation": interpolation, "fill_color": 7}
    encoder = openclip.wrap_model(model, name="tiny", dim=32, tokenizer=None)
    config = open_clip.transform.PreprocessCfg(**open_clip.get_model_preprocess_cfg(model))
    transform = open_clip.transform.image_transform_v2(config, is_train=False)
    for size in SIZES:
        ours = (encoder.prepare([picture(size)])[0] - encoder.mean[0]) / encoder.std[0]
        assert (ours - transform(picture(size))).abs().max() < 1e-5, size


def test_towers_without_a_processor_prepare_images_as_the_paper(tiny_folder: Path) -> None:
    encoder = rc.load(tiny_folder, device="cpu")
    assert encoder.preprocessing == Preprocessing.paper(32) == Preprocessing(32, 37)


def test_a_recipe_prepares_images_as_the_paper_unless_it_says_otherwise(hf_folder: Path) -> None:
    from react_clip.evaluation.recipe import Recipe
    from react_clip.evaluation.sets import load_encoders

    recipe = {"model": str(hf_folder), "datasets": ["stl10"], "defenses": ["undefended"]}
    encoder, attacked = load_encoders(Recipe.from_dict(recipe), "cpu")
    assert encoder is attacked
    assert encoder.preprocessing == Preprocessing.paper(64)
    own, _ = load_encoders(Recipe.from_dict(recipe | {"preprocessing": "model"}), "cpu")
    assert own.preprocessing.resize == 64
    assert own.fingerprint() != encoder.fingerprint(), "results of one are not those of the other"


def test_transformers_models_are_defended_and_calibrated(hf_folder: Path) -> None:
    encoder = rc.load(hf_folder, device="cpu")
    check_defended(encoder, smaller=True)
    check_our_tower(encoder, is_clip=hf_folder.name == "metaclip_2")


@pytest.mark.parametrize("device", ["mps", "mps:0"])
def test_mps_is_refused_in_one_line_where_there_is_none(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(rc.ReactClipError, match="this machine has none; use cpu"):
        rc.load("clip-vit-b-16", device=device)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.delenv("PYTORCH_ENABLE_MPS_FALLBACK", raising=False)
    with pytest.warns(UserWarning, match="PYTORCH_ENABLE_MPS_FALLBACK=1 is not set"):
        assert resolve_device(device).type == "mps"


def test_a_model_without_a_threshold_is_calibrated_on_the_way(hf_folder: Path, tmp_path: Path, run: Run) -> None:
    colours = np.random.default_rng(0).integers(0, 255, (24, 3))
    for number, colour in enumerate(colours.tolist()):
        Image.new("RGB", (64, 64), tuple(colour)).save(tmp_path / f"{number}.png")
    given = ("classify", tmp_path / "0.png", "--model", hf_folder, "--labels", "cat, dog")
    code, _, err = run(*given)
    assert code == 2
    assert "--calibrate-on PHOTOS" in err
    code, out, err = run(*given, "--calibrate-on", tmp_path)
    assert code == 0, err
    assert out.startswith(str(tmp_path / "0.png"))
    assert "SecondLook's threshold is" in err
    assert "from 24 photos" in err


@pytest.mark.parametrize("family", tiny_families.OPEN_CLIP)
def test_open_clip_models_are_defended_and_calibrated(family: str, tmp_path: Path) -> None:
    encoder = rc.load(tiny_families.write_open_clip(tmp_path, family), device="cpu")
    model: Any = encoder.tower
    pixels = photos(3, encoder.image_size)
    with torch.no_grad():
        expected = model.encode_image((pixels - encoder.mean) / encoder.std, normalize=True)
    assert (encoder(pixels) - expected).abs().max() < 1e-5
    assert encoder.similarity.sigmoid == (family == "sigmoid")
    check_defended(encoder, smaller=family.startswith("vit"))
    check_our_tower(encoder, is_clip=family == "vit")


def check_defended(encoder: rc.Encoder, *, smaller: bool) -> None:
    """Both defences answer, SecondLook calibrates, and says whether its look is smaller."""
    pixels = photos(20, encoder.image_size)
    clf = rc.ZeroShotClassifier.from_features(encoder, ["cat", "dog"], torch.eye(2, encoder.dim))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        # Features of random weights move a lot; a threshold that half of the photos pass is still below the limit.
        guard = rc.SecondLook.calibrate(encoder, pixels, clean_pass=0.5).config
    assert any("takes one image size only" in str(warning.message) for warning in said) is not smaller
    out = guard(clf, pixels[:4], seed=0)
    assert out.look_is_smaller is smaller
    assert out.drift.min() > 0
    assert torch.allclose(out.features.norm(dim=1), torch.ones(4), atol=1e-5)
    paper = rc.ReACT(tau=None, views=2)(clf, pixels[:2], seed=0)
    assert bool(paper.gated.all())
    assert 0 <= paper.instability.nan_to_num(0.0).min() <= paper.instability.nan_to_num(0.0).max() <= 0.6932


def check_our_tower(encoder: rc.Encoder, *, is_clip: bool) -> None:
    """Models of CLIP's architecture can compute by our tower; others keep their own layers. Features are the same."""
    assert isinstance(encoder, ViTEncoder)
    views = [photos(3, encoder.image_size), *([photos(3, 48)] if is_clip else [])]
    expected = [encoder.encode_views(view) for view in views]
    encoder.share_weights()
    assert (encoder.vision is not None) is is_clip
    for view, features in zip(views, expected, strict=True):
        assert (encoder.encode_views(view) - features).abs().max() < 1e-5
