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
from react_clip import linf
from react_clip.encoders.checkpoints import image_parameters, is_image_key
from react_clip.finetune import (
    CLIPFT,
    FARE,
    PMGAFT,
    Finetuned,
    InnerAttack,
    Optimiser,
    Settings,
    TeCoA,
    finetune,
    get,
    names,
)
from react_clip.finetune.folder import read_log
from react_clip.finetune.methods import Batch, Method
from react_clip.finetune.photos import Photos, augmented, check_memory, stream_keys
from react_clip.finetune.training import Task, gradients
from toys import ToyEncoder

Slopes = Callable[..., tuple[float, Tensor]]
EVERY = [TeCoA(), PMGAFT(), FARE(), CLIPFT()]
FAST = {
    "tecoa": Optimiser("sgd", lr=3e-3),
    "pmg-aft": Optimiser("sgd", lr=0.3),
    "fare": Optimiser("adamw", lr=1e-3),
    "clip-ft": Optimiser("adamw", lr=1e-3),
}
"""Rates at which twelve steps move the tiny CLIP."""
LEAST_FALL = {"tecoa": 0.6, "pmg-aft": 0.97, "fare": 0.6, "clip-ft": 0.6}
"""Share of the loss that is left at most; plain cosines keep the cross-entropy of PMG-AFT near that of chance."""
QUICK = Settings(steps=12, batch=12, warmup=1, attack=InnerAttack(eps=4 / 255, step=4 / 255))


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


def released_pmg_aft(cosines: Tensor, original: Tensor, clean: Tensor, labels: Tensor, weight: float) -> Tensor:
    """The loss of the released PMG-AFT from cosines ``[N, K]``: a mean cross-entropy and two summed divergences."""
    divergence = torch.nn.KLDivLoss(reduction="sum")
    log_p = cosines.log_softmax(1)
    near_original, near_clean = divergence(log_p, original.softmax(1)), divergence(log_p, clean.softmax(1))
    return torch.nn.CrossEntropyLoss()(cosines, labels) + weight * (near_clean + near_original)


def test_the_methods_are_their_equations(encoder: rc.Encoder, photos: Any, class_features: Tensor) -> None:
    moved = rc.load(encoder.name, device="cpu")
    with torch.no_grad():
        for weight in image_parameters(moved).values():
            weight.mul_(1.3)
    clean, labels = photos[0][:5].float() / 255, photos[1][:5]
    adversarial = (clean + 0.02 * random(*clean.shape).sign()).clamp(0, 1)
    batch = Batch(moved.raw, encoder.raw, clean, labels, class_features, photos=5)

    def log_p(model: rc.Encoder, pixels: Tensor) -> Tensor:
        return (100 * model(pixels) @ class_features.T).log_softmax(1)

    ce = -log_p(moved, adversarial)[torch.arange(5), labels]
    assert torch.allclose(TeCoA().loss(batch, adversarial), ce, atol=1e-4)
    far = (clean + 0.2 * random(*clean.shape).sign()).clamp(0, 1)
    pairs = ((moved, far), (encoder, far), (moved, clean))
    cosines = [(model(pixels) @ class_features.T).double() for model, pixels in pairs]
    # Divergences of plain cosines are small; weighing them by 100 makes them count.
    losses = [PMGAFT(clean_weight=weight, original_weight=weight).loss(batch, far).mean().item() for weight in (0, 100)]
    assert losses == pytest.approx([released_pmg_aft(*cosines, labels, weight).item() for weight in (0, 100)], rel=1e-3)
    assert losses[1] > 1.1 * losses[0]
    assert PMGAFT() == PMGAFT(clean_weight=1.0, original_weight=1.0)
    apart = (moved.raw(adversarial) - encoder.raw(clean)).square().sum(1)
    assert torch.allclose(FARE().loss(batch, adversarial), apart, rtol=1e-4)
    slow = slow_contrastive(moved.raw(adversarial).double(), class_features.double(), labels.tolist())
    assert CLIPFT().loss(batch, adversarial).tolist() == pytest.approx(slow, rel=1e-3)


def test_each_method_has_its_published_optimiser() -> None:
    published = {
        "tecoa": Optimiser("sgd", lr=1e-5, weight_decay=0.0, momentum=0.9),
        "pmg-aft": Optimiser("sgd", lr=5e-5, weight_decay=0.0, momentum=0.9),
        "fare": Optimiser("adamw", lr=1e-5, weight_decay=1e-4),
    }
    assert {kind: get(kind).optimiser for kind in published} == published


def test_training_is_sgd_with_momentum_along_a_warm_up_and_a_cosine(
    encoder: rc.Encoder, photos: Any, class_features: Tensor, tmp_path: Path
) -> None:
    settings = QUICK.replace(steps=4, batch=6, warmup=2)
    method = TeCoA(optimiser=Optimiser("sgd", lr=1e-3, momentum=0.9, weight_decay=0.1))
    trained = finetune(encoder, method, *photos, class_features, out=tmp_path / "run", settings=settings)
    student = rc.load(encoder.name, device="cpu")
    weights = [weight.requires_grad_(True) for weight in image_parameters(student).values()]
    task = Task(student, encoder, method, Photos(*photos), class_features, settings)
    velocity = [torch.zeros_like(weight) for weight in weights]
    for step, share in enumerate((0.5, 1.0, 1.0, 0.5)):
        student.zero_grad()
        gradients(task, step)
        with torch.no_grad():
            for weight, speed in zip(weights, velocity, strict=True):
                assert weight.grad is not None
                speed.mul_(0.9).add_(weight.grad + 0.1 * weight)
                weight.sub_(1e-3 * share * speed)
    for expected, actual in zip(weights, image_parameters(trained.encoder).values(), strict=True):
        assert torch.allclose(expected, actual, atol=1e-6)


# ---------------------------------------------------------------------- the inner attack


def released_fare_attack(encoder: rc.Encoder, clean: Tensor, target: Tensor, start: Tensor, eps: float) -> Tensor:
    """FARE's released inner attack, step by step: 2 steps of eps with momentum 0.9 on the mean squared distance."""
    perturbation, velocity = start - clean, torch.zeros_like(clean)
    for _ in range(2):
        perturbation = perturbation.detach().requires_grad_(True)
        loss = (encoder.raw(clean + perturbation) - target).square().sum(1).mean()
        (slope,) = torch.autograd.grad(loss, perturbation)
        velocity = (0.9 * velocity + slope.sign()).sign()
        perturbation = (perturbation + eps * velocity).clamp(-eps, eps)
        perturbation = (clean + perturbation).clamp(0, 1) - clean
    return (clean + perturbation).detach()


def test_the_inner_attack_of_fare_equals_the_released_one_with_momentum(
    encoder: rc.Encoder, photos: Any, class_features: Tensor
) -> None:
    clean, eps = photos[0][:6].float() / 255, 4 / 255
    batch = Batch(encoder.raw, encoder.raw, clean, photos[1][:6], class_features, photos=6)
    keys, _ = stream_keys(torch.arange(6), step=0, seed=0)
    start = linf.Ball(clean, eps).random_start(keys)
    ours = InnerAttack(eps=eps, step=eps)(FARE(), batch, keys)
    theirs = released_fare_attack(encoder, clean, batch.original_clean, start, eps)
    # Slopes within rounding of zero may have either sign.
    assert ((ours - theirs).abs() < 1e-6).float().mean() > 0.999


def test_the_inner_attack_of_pmg_aft_climbs_plain_cosines(
    encoder: rc.Encoder, photos: Any, class_features: Tensor
) -> None:
    clean, labels = photos[0][:6].float() / 255, photos[1][:6]
    batch = Batch(encoder.raw, encoder.raw, clean, labels, class_features, photos=6)
    cosines = encoder(clean) @ class_features.T
    expected = torch.nn.functional.cross_entropy(cosines, labels, reduction="none")
    assert torch.allclose(PMGAFT().objective(batch)(encoder.raw(clean)), expected, atol=1e-5)


@pytest.mark.parametrize("method", EVERY, ids=by_name)
def test_the_inner_attack_stays_in_its_ball_and_climbs(
    method: Method, encoder: rc.Encoder, photos: Any, class_features: Tensor
) -> None:
    clean, labels = photos[0].float() / 255, photos[1]
    clean[:, :, :4] = 0.0  # the border of [0, 1] must hold as well
    batch = Batch(encoder.raw, encoder.raw, clean, labels, class_features, photos=len(clean))
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
        after = objective(encoder.raw(attacked))
        start = objective(encoder.raw(drawn))
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
    method = request.param.replace(optimiser=FAST[request.param.kind])
    return finetune(encoder, method, photos[0], *labelled, out=out, settings=QUICK)


def test_the_loss_falls(trained: Finetuned) -> None:
    rows = read_log(trained.folder / "log.csv")
    assert [row.step for row in rows] == list(range(1, 13))
    assert sum(row.loss for row in rows[-3:]) / 3 < LEAST_FALL[trained.record["method"]["kind"]] * rows[0].loss
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
    method = TeCoA(optimiser=FAST["tecoa"])
    ours = finetune(encoder, method, *photos, class_features, out=tmp_path / "hf", settings=settings)
    theirs = finetune(twin, method, *photos, class_features, out=tmp_path / "open_clip", settings=settings)
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
