"""Encoders: readers of one checkpoint agree, wrong pixels are refused, and nothing stale is used."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from thread_stress import stress
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import react_clip as rc
import tiny_clip
from react_clip.accelerate import Graphs
from react_clip.encoders import layers
from react_clip.encoders.vision import VisionTower
from toys import ToyEncoder, on_a_gpu, patch_encoder, toy_images


def views(*sizes: int, count: int = 3) -> list[Tensor]:
    """Views whose pixels leave [0, 1]."""
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(count, 3, size, size, generator=generator) * 1.5 - 0.25 for size in sizes]


# ---------------------------------------------------------------------- features


def test_transformers_and_open_clip_agree_on_the_same_weights(tiny_folder: Path, open_clip_name: str) -> None:
    one, other = rc.load(tiny_folder, device="cpu"), rc.load(open_clip_name, device="cpu")
    pixels = torch.rand(5, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert (one(pixels) - other(pixels)).abs().max() < 1e-5
    prompts = ["This is a photo of a cat.", "a very long prompt about nothing " * 30]
    assert (one.encode_text(prompts) - other.encode_text(prompts)).abs().max() < 1e-4
    assert (one(pixels)[0] - one(pixels)[1]).norm() > 1e-2, "a tower that maps everything to one point proves nothing"
    for encoder in (one, other):
        names = [name for name, _ in encoder.named_parameters() if not name.startswith("tower.")]
        assert not any("vis" in name for name in names), "the library's image tower is dropped"


@pytest.mark.parametrize("activation", ["quick_gelu", "gelu"])
def test_our_tower_computes_as_transformers_at_any_size_of_whole_patches(tmp_path: Path, activation: str) -> None:
    from transformers import CLIPModel

    folder = tiny_clip.write_hf(tmp_path / "model", activation=activation)
    encoder, model = rc.load(folder, device="cpu"), CLIPModel.from_pretrained(folder).eval()
    assert isinstance(encoder.tower, VisionTower)
    for pixels in views(24, 32, 40):
        size = pixels.shape[-1]
        with torch.no_grad():
            normalised = (pixels - encoder.mean) / encoder.std
            hidden = model.vision_model(pixel_values=normalised, interpolate_pos_encoding=True).pooler_output
            expected = model.visual_projection(hidden)
        assert (encoder.raw(pixels) - expected).abs().max() < 1e-4
        assert (encoder.encode(pixels) - F.normalize(expected)).abs().max() < 1e-5
        assert encoder.size_near(size / 32) == size
        assert encoder.token_fraction(size) == (1 + (size // 8) ** 2) / 17


@pytest.mark.parametrize("count", [1, 3])
def test_views_of_several_sizes_share_a_call(count: int) -> None:
    encoder, images = patch_encoder(torch.float64), [each.double() for each in views(32, 24, 40, count=count)]
    for together, view in zip(encoder.encode_several(images), images, strict=True):
        assert (together - encoder.encode(view)).abs().max() < 1e-12
    leaves = [image.clone().requires_grad_() for image in images]
    sum(features[:, 0].sum() for features in encoder.encode_several(leaves)).backward()
    for leaf in leaves:
        [alone] = torch.autograd.grad(encoder.encode(leaf)[:, 0].sum(), leaf)
        assert leaf.grad is not None
        assert (leaf.grad - alone).abs().max() < 1e-12


@pytest.mark.parametrize(("size", "parts"), [(32, [3, 3, 1]), (24, [5, 2]), (64, [1] * 7)])
def test_a_cpu_encodes_few_tokens_at_a_time(size: int, parts: list[int]) -> None:
    encoder, counts = patch_encoder(torch.float64), []
    encoder.cpu_tokens = 200  # an image has 65, 37 or 257
    images = torch.rand(7, 3, size, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    handle = encoder.tower.register_forward_hook(lambda _, __, out: counts.append(len(out)))
    features = encoder.encode(images)
    handle.remove()
    assert counts == parts
    assert (features - patch_encoder(torch.float64).encode(images)).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_features_are_unit_fp32_and_pixels_are_normalised_in_fp32(tiny_folder: Path, dtype: str) -> None:
    pixels = torch.rand(3, 3, 32, 32)
    exact, encoder = rc.load(tiny_folder, device="cpu"), rc.load(tiny_folder, device="cpu", dtype=dtype)
    features = encoder(pixels)
    assert encoder.dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    assert features.dtype == torch.float32
    assert torch.allclose(features.norm(dim=1), torch.ones_like(features[:, 0]), atol=1e-6)
    assert (features * exact(pixels)).sum(1).min() > 0.99
    converted = exact.to(encoder.dtype)
    assert torch.equal(converted.mean, encoder.mean)
    assert torch.equal(converted(pixels), features)
    assert converted.fingerprint() == encoder.fingerprint()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_logit_scale_is_the_models_own(tiny_copy: Path, tmp_path: Path, dtype: str) -> None:
    weights = load_file(tiny_copy / "model.safetensors") | {"logit_scale": torch.tensor(3.0)}
    save_file(weights, tiny_copy / "model.safetensors", metadata={"format": "pt"})
    checkpoint_file = tiny_clip.write_open_clip(tiny_copy, tmp_path / "open_clip")
    for name in (tiny_copy, f"open_clip:{tiny_clip.OPEN_CLIP_NAME}/{checkpoint_file}"):
        encoder = rc.load(name, dtype=dtype, device="cpu")
        assert encoder.similarity.scale == pytest.approx(torch.tensor(3.0).exp().item()), "also where the tower is bf16"
        clf, pixels = rc.ZeroShotClassifier(encoder, ["cat", "dog"]), torch.rand(2, 3, 32, 32)
        expected = encoder.similarity.scale * encoder(pixels) @ clf.class_features.T
        assert torch.allclose(clf(pixels), expected, atol=1e-4)
    assert (ToyEncoder().similarity.scale, ToyEncoder().similarity.sigmoid) == (100.0, False)


# ---------------------------------------------------------------------- pixels


@pytest.mark.parametrize(
    ("pixels", "says"),
    [
        (torch.full((1, 3, 16, 16), 255.0), r"pixels span 255 to 255; they must lie in \[0, 1\]"),
        (torch.full((1, 3, 16, 16), 1.0000001), r"span 1\.00000012 to 1\.00000012; they must"),
        (torch.full((1, 3, 16, 16), torch.nan), "NaN"),
        (torch.zeros(1, 3, 16, 16, dtype=torch.uint8), "uint8 images: x.float"),
        (torch.zeros(3, 16, 16), r"shape \[3, 16, 16\]"),
        (torch.zeros(1, 3, 20, 20), r"takes \[B, 3, 16, 16\]"),
        (torch.zeros(0, 3, 16, 16), "B >= 1"),
    ],
    ids=["255", "rounding", "NaN", "uint8", "no batch", "size", "empty"],
)
def test_wrong_pixels_are_refused(pixels: Tensor, says: str) -> None:
    with pytest.raises(rc.ReactClipError, match=says):
        ToyEncoder()(pixels)


def test_only_views_may_have_another_size() -> None:
    encoder, toy = patch_encoder(), ToyEncoder()
    for encode, wrong, right in ((encoder, 24, 32), (encoder.encode, 22, 32), (toy.encode, 12, 16)):
        with pytest.raises(rc.ReactClipError, match=rf"takes \[B, 3, {right}, {right}\]"):
            encode(torch.rand(1, 3, wrong, wrong))
    assert (toy.size_near(0.75), toy.takes(12), toy.token_fraction(16)) == (None, False, 1.0)
    assert toy.encode(toy_images(2) * 3 - 1).shape == (2, 12), "views may leave [0, 1]"


# ---------------------------------------------------------------------- passes


def test_passes_are_counted_in_images_of_the_models_size() -> None:
    encoder, other = patch_encoder(), patch_encoder()
    images, small = views(32, 24, count=4)
    with encoder.counting() as whole:
        encoder.encode_several([images, small])
        other.encode(images)
        with encoder.counting() as part:
            leaf = images.clone().requires_grad_()
            encoder.raw(leaf).sum().backward()
        ThreadPoolExecutor(1).submit(encoder.encode, images).result()  # a thread counts its own passes
    encoder.encode(images)
    assert (part.forward, part.backward) == (4.0, 4.0)
    assert (whole.forward, whole.backward) == (8.0 + 4 * encoder.token_fraction(24), 4.0)
    with encoder.counting() as count:
        checkpoint(encoder.encode, leaf, use_reentrant=False).sum().backward()
    assert (count.forward, count.backward) == (4.0, 4.0), "activations computed again are no further pass"


# ---------------------------------------------------------------------- nothing stale


def changed_weights(encoder: rc.Encoder) -> Iterator[str]:
    """Change weights in every way that Python allows; yields after each."""
    tower: nn.Module = encoder.tower
    attention = tower.transformer["resblocks"][0].attn  # type: ignore[index]
    with torch.no_grad():
        attention.in_proj_weight = nn.Parameter(-attention.in_proj_weight, requires_grad=False)
        yield "replaced"
        attention.out_proj.weight.data = -attention.out_proj.weight
        yield "other data"
        attention.out_proj.bias.data[0] += 3.0
        yield "data changed in place"
        tower.positional_embedding.data.neg_()  # type: ignore[union-attr, operator]
        yield "positions changed in place"
        encoder.mean.add_(0.1)
        yield "normalisation"
        encoder.std = encoder.std * 2.0
        yield "normalisation replaced"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_a_gpu)])
def test_changed_weights_change_features_and_the_fingerprint(device: str) -> None:
    encoder, images = patch_encoder().to(device).accelerate(), views(32, 24)
    seen = {encoder.fingerprint()}
    with torch.no_grad():
        before = [features.clone() for features in (*encoder.encode_several(images), *encoder.encode_several(images))]
        for how in changed_weights(encoder):
            features = [*encoder.encode_several(images), *encoder.encode_several(images)]
            for new, old in zip(features[1::2], before[1::2], strict=True):
                assert (new - old).abs().max() > 1e-4, how
            before = features
            assert encoder.fingerprint() not in seen, how
            seen.add(encoder.fingerprint())


def test_fingerprints_tell_weights_precisions_and_activations_apart(
    tiny_folder: Path, other_folder: Path, tmp_path: Path
) -> None:
    gelu, heads = tiny_clip.write_hf(tmp_path / "gelu", activation="gelu"), tmp_path / "heads"
    config = json.loads((shutil.copytree(tiny_folder, heads) / "config.json").read_text())
    config["text_config"]["num_attention_heads"] *= 2
    (heads / "config.json").write_text(json.dumps(config))
    encoders = [rc.load(each, device="cpu") for each in (tiny_folder, other_folder, gelu, heads)]
    encoders.append(rc.load(tiny_folder, device="cpu", dtype="bf16"))
    encoders.append(deepcopy(encoders[0]))
    next(encoders[-1].text.parameters()).data[0, 0] += 1.0
    encoders.append(deepcopy(encoders[0]))
    encoders[-1].tower.register_buffer("shift", torch.zeros(1))
    assert len({encoder.fingerprint() for encoder in encoders}) == len(encoders)
    assert rc.load(tiny_folder, device="cpu").fingerprint() == encoders[0].fingerprint()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_a_gpu)])
def test_accelerated_encoders_can_be_copied_and_pickled(tiny_folder: Path, device: str) -> None:
    encoder, [images] = rc.load(tiny_folder, device=device, compile=True), views(32)
    expected = [encoder.encode(images) for _ in range(3)][-1]
    for copy in (deepcopy(encoder), pickle.loads(pickle.dumps(encoder))):
        assert torch.allclose(copy.encode(images), expected, atol=1e-6)
        assert torch.equal(copy.encode_text(["a cat"]), encoder.encode_text(["a cat"]))
        assert copy.fingerprint() == encoder.fingerprint()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_a_gpu)])
def test_eight_threads_get_the_bits_that_one_gets(device: str) -> None:
    clf = rc.ZeroShotClassifier.from_features(patch_encoder().to(device).accelerate(), list("abc"), torch.eye(3, 12))
    calls, wrong = stress(clf, 15)
    assert (set(calls.values()), len(calls) > 7, wrong) == ({15}, True, {})


# ---------------------------------------------------------------------- acceleration


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_an_encoder_can_be_traced_and_a_defence_says_why_not() -> None:
    encoder, [images], [others] = patch_encoder(), views(32), views(32, count=2)
    images, others = images.clamp(0, 1), others.clamp(0, 1).flip(3)
    assert torch.equal(torch.jit.trace(encoder, images)(others), encoder(others))  # type: ignore[no-untyped-call]
    clf = rc.ZeroShotClassifier.from_features(encoder, list("abc"), torch.eye(3, 12))
    with pytest.raises(rc.ReactClipError, match="a trace would hold the decisions about one image for all"):
        torch.jit.trace(rc.as_module(clf, rc.ReACT()), images)  # type: ignore[no-untyped-call]


def test_graphs_are_bounded() -> None:
    graphs = Graphs(most=3)
    for count in (*range(1, 9), 7, 8):
        graphs._remember(count, None)
    assert list(graphs._recordings) == [6, 7, 8], "the least recently used go"
    assert not graphs.take([torch.zeros(1)]), "nothing is recorded on a CPU"


def test_on_a_cpu_nothing_is_compiled(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", None)
    [images] = views(32)
    features = [rc.load(tiny_folder, device="cpu", compile=each).encode(images) for each in (False, True)]
    assert torch.equal(*features)


def test_without_a_compiler_there_is_a_warning_and_a_full_memory_is_not_taken_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(error: Exception) -> Any:
        return lambda: Mock(side_effect=error)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: torch.ones(shape))
    monkeypatch.setattr(layers, "compiled_add_norm", failing(torch.OutOfMemoryError("full")))
    with pytest.raises(torch.OutOfMemoryError):
        layers.can_compile.__wrapped__()
    monkeypatch.setattr(layers, "compiled_add_norm", failing(RuntimeError("no C compiler")))
    with pytest.warns(UserWarning, match="which costs a tenth of the speed: no C compiler"):
        assert not layers.can_compile.__wrapped__()


@on_a_gpu
def test_graphs_give_the_bits_of_the_same_layers_without() -> None:
    plain, fast = patch_encoder().cuda(), patch_encoder().cuda().accelerate()
    assert fast._graphs is not None
    for module in fast.tower.modules():
        if hasattr(module, "compiled"):
            module.compiled = False
    with torch.no_grad():
        for count in (1, 3, 64, 65, 3):
            batch = [each.cuda() for each in views(32, 24, count=count)]
            for _ in range(3):
                assert all(map(torch.equal, fast.encode_several(batch), plain.encode_several(batch))), count
        assert sum(each is not None for each in fast._graphs._recordings.values()) == 4
    leaf = batch[0].clone().requires_grad_()
    assert torch.autograd.grad(fast.encode(leaf).sum(), leaf)[0].abs().sum() > 0, "gradients need no graph"
    fast.half()
    assert not fast._graphs._recordings, "graphs of converted weights are dropped"
    with pytest.raises(RuntimeError, match="no such luck"):
        fast.record(_fail, batch)


def _fail(*views: Tensor) -> list[Tensor]:
    raise RuntimeError("no such luck")


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_compiled_layers_change_features_by_rounding_alone(dtype: torch.dtype) -> None:
    plain, fast = patch_encoder(dtype).cuda(), patch_encoder(dtype).cuda().accelerate()
    with torch.no_grad():
        for count in (1, 7, 200):
            for view in views(32, 24, count=count):
                cosines = (plain.encode(view) * fast.encode(view)).sum(1)
                assert cosines.min() > 1 - 10 * torch.finfo(dtype).eps


@on_a_gpu
@pytest.mark.parametrize("count", [1, 3, 40])
def test_an_accelerated_defence_gives_the_same_answers(count: int) -> None:
    images = torch.rand(count, 3, 32, 32, generator=torch.Generator().manual_seed(0)).cuda()
    for guard in (rc.ReACT(tau=0.3), rc.SecondLook(threshold=0.2)):
        answers = []
        for encoder in (patch_encoder().cuda(), patch_encoder().cuda().accelerate()):
            clf = rc.ZeroShotClassifier.from_features(encoder, list("abc"), torch.eye(3, 12))
            answers.append([guard(clf, images, seed=0) for _ in range(3)][-1])
        plain, fast = answers
        assert torch.equal(plain.gated, fast.gated)
        assert torch.allclose(plain.features, fast.features, atol=1e-3)
