"""The four methods on the tiny CLIP: their losses, their inner attack, and what moves when they train."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import react_clip as rc
import tiny_clip
from react_clip.encoders.checkpoints import image_parameters, is_image_key
from react_clip.finetune import CLIPFT, FARE, PMGAFT, Finetuned, InnerAttack, Settings, TeCoA, finetune, get, names
from react_clip.finetune.folder import read_log
from react_clip.finetune.methods import Batch, Method
from react_clip.finetune.photos import Photos, augmented, check_memory, stream_keys
from react_clip.finetune.training import Task, gradients
from toys import ToyEncoder

Slopes = Callable[..., tuple[float, Tensor]]
EVERY = [TeCoA(), PMGAFT(), FARE(), CLIPFT()]
QUICK = Settings(steps=12, batch=12, lr=1e-3, warmup=1, attack=InnerAttack(eps=4 / 255, step=4 / 255))


def by_name(method: Method) -> str:
    return method.kind


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------------- losses, against slow literal references


def slow_contrastive(features: Tensor, classes: Tensor, labels: list[int]) -> list[float]:
    unit = [row / row.norm() for row in features]
    scores = [[100 * float(f @ classes[y]) for y in labels] for f in unit]
    count, values = len(labels), []
    for i in range(count):
        positives = [j for j in range(count) if labels[j] == labels[i]]
        total = 0.0
        for j in positives:
            row = math.log(sum(math.exp(scores[i][k]) for k in range(count)))
            column = math.log(sum(math.exp(scores[k][i]) for k in range(count)))
            total += (scores[i][j] - row) + (scores[j][i] - column)
        values.append(-total / (2 * len(positives)))
    return values


def test_the_methods_are_their_equations(encoder: rc.Encoder, photos: Any, class_features: Tensor) -> None:
    moved = rc.load(encoder.name, device="cpu")
    with torch.no_grad():
        for weight in image_parameters(moved).values():
            weight.mul_(1.05)
    clean, labels = photos[0][:5].float() / 255, photos[1][:5]
    adversarial = (clean + 0.02 * random(*clean.shape).sign()).clamp(0, 1)
    batch = Batch(moved.raw_features, encoder.raw_features, clean, labels, class_features)

    def log_p(model: rc.Encoder, pixels: Tensor) -> Tensor:
        return (100 * model(pixels) @ class_features.T).log_softmax(1)

    ce = -log_p(moved, adversarial)[torch.arange(5), labels]
    assert torch.allclose(TeCoA().loss(batch, adversarial), ce, atol=1e-4)
    p, q, o = log_p(moved, clean), log_p(moved, adversarial), log_p(encoder, adversarial)
    expected = ce + 0.5 * (p.exp() * (p - q)).sum(1) + 2 * (o.exp() * (o - q)).sum(1)
    assert torch.allclose(PMGAFT(clean_weight=0.5, original_weight=2.0).loss(batch, adversarial), expected, atol=1e-4)
    apart = (moved.raw_features(adversarial) - encoder.raw_features(clean)).square().sum(1)
    assert torch.allclose(FARE().loss(batch, adversarial), apart, rtol=1e-4)
    slow = slow_contrastive(moved.raw_features(adversarial).double(), class_features.double(), labels.tolist())
    assert CLIPFT().loss(batch, adversarial).tolist() == pytest.approx(slow, rel=1e-3)


# ---------------------------------------------------------------------- the inner attack


@pytest.mark.parametrize("method", EVERY, ids=by_name)
def test_the_inner_attack_stays_in_its_ball_and_climbs(
    method: Method, encoder: rc.Encoder, photos: Any, class_features: Tensor
) -> None:
    clean, labels = photos[0].float() / 255, photos[1]
    clean[:, :, :4] = 0.0  # the border of [0, 1] must hold as well
    batch = Batch(encoder.raw_features, encoder.raw_features, clean, labels, class_features)
    keys, _ = stream_keys(torch.arange(len(clean)), step=3, seed=0)
    attack = InnerAttack()
    attacked = attack(method, batch, keys)
    assert (attacked - clean).abs().max() <= 1 / 255 + 1e-7
    assert attacked.min() >= 0
    assert attacked.max() <= 1
    assert not attacked.requires_grad
    objective = method.objective(batch)
    drawn = attack.replace(step=1e-12)(method, batch, keys)  # steps too small to leave the random start
    assert (drawn - clean).abs().max() > 0.5 / 255
    with torch.no_grad():
        after = objective(encoder.raw_features(attacked))
        start = objective(encoder.raw_features(drawn))
    assert (after > start).float().mean() > 0.9
    again = attack(method, batch, keys)
    assert torch.equal(again, attacked)
    other, _ = stream_keys(torch.arange(len(clean)), step=4, seed=0)
    assert not torch.equal(attack(method, batch, other), attacked)


# ---------------------------------------------------------------------- training


@pytest.fixture(scope="module", params=EVERY, ids=by_name)
def trained(
    request: pytest.FixtureRequest,
    encoder: rc.Encoder,
    photos: Any,
    class_features: Tensor,
    tmp_path_factory: pytest.TempPathFactory,
) -> Finetuned:
    out = tmp_path_factory.mktemp("trained") / request.param.kind
    labelled = (photos[1], class_features) if request.param.needs_labels else (None, None)
    return finetune(encoder, request.param, photos[0], *labelled, out=out, settings=QUICK)


def test_the_loss_falls(trained: Finetuned) -> None:
    rows = read_log(trained.folder / "log.csv")
    assert [row.step for row in rows] == list(range(1, 13))
    assert sum(row.loss for row in rows[-3:]) / 3 < 0.6 * rows[0].loss
    assert trained.record["final_loss"] == pytest.approx(sum(row.loss for row in rows[-2:]) / 2)


def test_only_the_image_tower_moves(trained: Finetuned, encoder: rc.Encoder, tiny_folder: Path) -> None:
    before, after = rc.load(tiny_folder, device="cpu").tower.state_dict(), trained.encoder.tower.state_dict()
    moved = {key for key in before if not torch.equal(before[key], after[key])}
    assert moved == {key for key in before if is_image_key(key)}, "all of the image tower, and nothing else"
    assert all(torch.equal(tensor, before[key]) for key, tensor in encoder.tower.state_dict().items())
    for model in (encoder, trained.encoder):
        assert not any(parameter.requires_grad for parameter in model.parameters())
        assert all(parameter.grad is None for parameter in model.parameters())


def test_the_folder_is_the_encoder(trained: Finetuned, photos: Any) -> None:
    loaded = rc.load(trained.folder, device="cpu")
    pixels = photos[0].float() / 255
    assert torch.equal(loaded(pixels), trained.encoder(pixels))
    assert loaded.name == trained.encoder.name == str(trained.folder)
    assert loaded.fingerprint() != trained.record["weights"]


@pytest.fixture(scope="module")
def slopes(encoder: rc.Encoder, photos: Any, class_features: Tensor) -> Slopes:
    """Loss and gradient of one step of a tower that stays where it is."""
    student = rc.load(encoder.name, device="cpu")
    weights = [weight.requires_grad_(True) for weight in image_parameters(student).values()]

    def compute(method: Method, **changes: Any) -> tuple[float, Tensor]:
        settings = QUICK.replace(**changes)
        student.zero_grad(set_to_none=True)
        loss = gradients(Task(student, encoder, method, Photos(*photos), class_features, settings), step=1)
        assert all(weight.dtype == weight.grad.dtype == torch.float32 for weight in weights if weight.grad is not None)
        return float(loss), torch.cat([weight.grad.flatten() for weight in weights if weight.grad is not None])

    return compute


@pytest.mark.parametrize("method", [TeCoA(), PMGAFT(), FARE()], ids=by_name)
def test_two_halves_add_up_to_the_whole(method: Method, slopes: Slopes) -> None:
    (loss, whole), (half_loss, halves) = slopes(method, batch=32), slopes(method, batch=16, accumulate=2)
    assert half_loss == pytest.approx(loss, rel=1e-3)
    assert torch.nn.functional.cosine_similarity(whole, halves, dim=0) > 0.999
    assert halves.norm().item() == pytest.approx(whole.norm().item(), rel=0.01)


@pytest.mark.parametrize("method", EVERY, ids=by_name)
def test_bf16_computes_nearly_the_same(method: Method, slopes: Slopes) -> None:
    (loss, slope), (half_loss, half_slope) = (slopes(method, batch=24, dtype=dtype) for dtype in ("fp32", "bf16"))
    assert half_loss == pytest.approx(loss, rel=0.1)
    assert half_loss != loss, "bf16 must really be used"
    assert half_slope.shape == slope.shape, "every weight must have a gradient"
    assert torch.nn.functional.cosine_similarity(slope, half_slope, dim=0) > 0.8


def test_open_clip_towers_train_the_same(
    open_clip_name: str, encoder: rc.Encoder, photos: Any, class_features: Tensor, tmp_path: Path
) -> None:
    twin = rc.load(open_clip_name, device="cpu")
    settings = QUICK.replace(steps=2)
    ours = finetune(encoder, "tecoa", *photos, class_features, out=tmp_path / "hf", settings=settings)
    theirs = finetune(twin, "tecoa", *photos, class_features, out=tmp_path / "open_clip", settings=settings)
    assert theirs.record["first_loss"] == pytest.approx(ours.record["first_loss"], rel=1e-3)
    pixels = photos[0][:4].float() / 255
    assert torch.equal(rc.load(tmp_path / "open_clip", device="cpu")(pixels), theirs.encoder(pixels))
    crossed = rc.load(f"{encoder.name}+{tmp_path / 'open_clip'}", device="cpu")
    assert torch.allclose(crossed(pixels), theirs.encoder(pixels), atol=1e-4)


# ---------------------------------------------------------------------- photos and settings


def test_every_photo_is_seen_once_a_pass(photos: Any) -> None:
    passes = Photos(*photos)
    seen = torch.cat([passes.indices(step, 10, seed=0) for step in range(12)])
    assert seen.view(5, 24).sort(dim=1).values.equal(torch.arange(24).expand(5, -1))
    assert not torch.equal(seen[:24], seen[24:48])
    assert torch.equal(passes.indices(3, 10, seed=0), seen[30:40])
    assert not torch.equal(passes.indices(0, 10, seed=1), seen[:10])
    assert len(passes.indices(0, 100, seed=0)) == 100, "a batch larger than the set goes round"


def test_augmentation_mirrors_half_and_crops_inside(photos: Any) -> None:
    pixels = photos[0].float() / 255
    pixels = pixels.repeat(4, 1, 1, 1)
    _, keys = stream_keys(torch.arange(len(pixels)), step=0, seed=0)
    mirrored = augmented(pixels, keys, "flip")
    flipped = (mirrored == pixels.flip(3)).flatten(1).all(1)
    assert ((mirrored == pixels).flatten(1).all(1) ^ flipped).all()
    assert 0.3 < flipped.float().mean() < 0.7
    assert torch.equal(augmented(pixels, keys, "none"), pixels)
    ramp = torch.linspace(0, 1, tiny_clip.SIZE).expand(len(pixels), 3, tiny_clip.SIZE, -1)
    cropped = augmented(ramp, keys, "crop")
    span = cropped.amax((1, 2, 3)) - cropped.amin((1, 2, 3))
    assert (span <= 1).all()
    assert span.min() > 0.5
    assert span.min() < 0.8, "some crops must be smaller than the whole"
    assert torch.equal(augmented(ramp[5:7], keys[5:7], "crop"), cropped[5:7])


def test_what_cannot_be_trained_is_refused(
    encoder: rc.Encoder, photos: Any, class_features: Tensor, tmp_path: Path
) -> None:
    pixels, labels = photos

    def refused(message: str, *arguments: Any, model: rc.Encoder = encoder, method: str = "tecoa") -> None:
        with pytest.raises(rc.ReactClipError, match=message) as caught:
            finetune(model, method, *arguments, out=tmp_path / "out")
        assert "\n" not in str(caught.value)

    refused("tecoa needs labels; .*fare", pixels)
    refused("pmg-aft needs class_features", pixels, labels, method="pmg-aft")
    refused(r"shape \[24, 3, 20, 32\]", pixels[:, :, :20], labels, class_features)
    refused("must lie in", pixels.float(), labels, class_features)
    refused("24 photos need one class index each", pixels, labels[:3], class_features)
    refused("labels span 0 to 3; there are class features for 0 to 1", pixels, labels, class_features[:2])
    refused(r"class features have shape \[4, 5\]", pixels, labels, class_features[:, :5])
    refused("NaN", pixels, labels, class_features * torch.nan)
    refused("does not exist; choose one of clip-ft, fare", pixels, labels, class_features, method="pgd")
    half = rc.load(encoder.name, device="cpu", dtype="bf16")
    refused("load fp32, and compute in bf16", pixels, labels, class_features, model=half)
    toy = ToyEncoder()
    refused("no CLIP image tower", torch.zeros(2, 3, 16, 16), labels[:2], torch.ones(4, 12), model=toy)
    assert not (tmp_path / "out").exists()
    with pytest.raises(rc.ReactClipError, match=r"1,281,167 photos at 224 pixels take 179\.6 GiB"):
        check_memory(1_281_167, 224, available=64 * 2**30)
    with pytest.raises(rc.ReactClipError, match="tecoa has no field 'clean_weight'"):
        get("tecoa", clean_weight=1.0)
    with pytest.raises(rc.ReactClipError, match="warmup is 300; it lies in 0 to 299"):
        Settings(warmup=300)
    assert names() == sorted(method.kind for method in EVERY)
