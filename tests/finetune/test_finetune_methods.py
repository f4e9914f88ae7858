"""The four methods on the tiny CLIP: their losses, their inner attack, and what moves when they train."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import react_clip as rc
import tiny_clip
from react_clip.encoders.checkpoints import image_parameters
from react_clip.finetune import METHODS, Finetuned, Settings, clip_ft, fare, finetune, pmg_aft, tecoa
from react_clip.finetune.folder import read_log
from react_clip.finetune.methods import Batch
from react_clip.finetune.steps import Trainer, attacked, augmented, photos_of
from toys import ToyEncoder

FAST = {"tecoa": (3e-3, 0.6), "pmg-aft": (0.3, 0.97), "fare": (1e-3, 0.6), "clip-ft": (1e-3, 0.6)}
"""Rate at which twelve steps move the tiny CLIP, and the fraction of the loss that is left at most."""
QUICK = Settings(
    steps=12,
    batch=12,
    warmup=1,
    eps=4 / 255,
    eps_start=4 / 255,
    attack_steps=2,
    clean=0.0,
    crop=(1.0, 1.0),
    cutmix=0.0,
    average=0.0,
    dtype="fp32",
    check_every=0,
)


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batch_of(student: rc.Encoder, original: rc.Encoder, photos: Any, class_features: Tensor, count: int = 6) -> Batch:
    return Batch(student.raw, original.raw, photos[0][:count].float() / 255, photos[1][:count], class_features)


# ---------------------------------------------------------------------- losses, against slow literal references


def slow_contrastive(features: Tensor, classes: Tensor, labels: list[int]) -> float:
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
    return sum(values) / count


def released_pmg_aft(cosines: Tensor, original: Tensor, clean: Tensor, labels: Tensor) -> Tensor:
    """The loss of the released PMG-AFT from cosines ``[N, K]``: a mean cross-entropy and two summed divergences."""
    divergence = torch.nn.KLDivLoss(reduction="sum")
    log_p = cosines.log_softmax(1)
    value: Tensor = torch.nn.CrossEntropyLoss()(cosines, labels)
    return value + divergence(log_p, original.softmax(1)) + divergence(log_p, clean.softmax(1))


def test_the_methods_are_their_equations(encoder: rc.Encoder, photos: Any, class_features: Tensor) -> None:
    moved = rc.load(encoder.name, device="cpu")
    with torch.no_grad():
        for weight in image_parameters(moved).values():
            weight.mul_(1.3)
    batch = batch_of(moved, encoder, photos, class_features)
    far = (batch.pixels + 0.2 * torch.randn(batch.pixels.shape, generator=draws()).sign()).clamp(0, 1)
    cosines = {name: (model(far) @ class_features.T).double() for name, model in (("moved", moved), ("old", encoder))}
    clean = (moved(batch.pixels) @ class_features.T).double()
    expected: dict[Any, Any] = {
        tecoa: torch.nn.functional.cross_entropy(100 * cosines["moved"], batch.labels),
        pmg_aft: released_pmg_aft(cosines["moved"], cosines["old"], clean, batch.labels),
        fare: (moved.raw(far) - encoder.raw(batch.pixels)).square().sum(1).mean(),
        clip_ft: slow_contrastive(moved.raw(far).double(), class_features.double(), batch.labels.tolist()),
    }
    for loss, value in expected.items():
        assert float(loss(batch, far)) == pytest.approx(float(value), rel=1e-3), loss.__name__
    assert float(fare(batch.quarter(), far[::4])) == pytest.approx(
        float((moved.raw(far[::4]) - encoder.raw(batch.pixels[::4])).square().sum(1).mean()), rel=1e-4
    )


@pytest.mark.parametrize("method", ["tecoa", "fare"])
def test_weights_follow_the_published_optimiser_along_a_warm_up_and_a_cosine(
    method: str,
    encoder: rc.Encoder,
    photos: Any,
    class_features: Tensor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A plain loop with torch's optimisers; FARE cuts long gradients, here at a length that these towers reach."""
    assert METHODS["fare"].longest_gradient == 20.0
    monkeypatch.setitem(METHODS, "fare", dataclasses.replace(METHODS["fare"], longest_gradient=0.5))
    settings = QUICK.replace(steps=4, batch=8, warmup=2, lr=1e-3, clean=0.5, average=0.9)
    labelled = (photos[1], class_features) if method == "tecoa" else (None, None)
    trained = finetune(encoder, method, photos[0], *labelled, out=tmp_path / "run", settings=settings)
    trainer, lengths = Trainer(encoder, method, photos[0], *labelled, settings), list[float]()
    weights = list(trainer.weights.values())
    average = [each.detach().clone() for each in weights]
    optimiser: torch.optim.Optimizer = torch.optim.SGD(weights, momentum=0.9)
    if method == "fare":
        optimiser = torch.optim.AdamW(weights, betas=(0.9, 0.95), weight_decay=1e-4)
    for step, fraction in enumerate((0.5, 1.0, 1.0, 0.5)):
        chosen = trainer.chosen(step)
        gradients = torch.autograd.grad(trainer.loss(step, chosen, photos[0][chosen]), weights)
        lengths.append(math.sqrt(sum(float(each.square().sum()) for each in gradients)))
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient * (min(1.0, 0.5 / lengths[-1]) if method == "fare" else 1.0)
        optimiser.param_groups[0]["lr"] = 1e-3 * fraction
        optimiser.step()
        decay = min(0.9, (step + 1) / (step + 10))
        average = [decay * mean + (1 - decay) * weight.detach() for mean, weight in zip(average, weights, strict=True)]
    assert method == "tecoa" or max(lengths) > 0.5
    for one, other in zip(average, image_parameters(trained.encoder).values(), strict=True):
        # Adam turns rounding near zero into signs.
        assert ((one - other).abs() < (1e-6 if method == "tecoa" else 1e-4)).float().mean() > 0.999


def test_the_clean_photos_count_with_their_weight(encoder: rc.Encoder, photos: Any, class_features: Tensor) -> None:
    trainer = Trainer(encoder, "tecoa", photos[0], photos[1], class_features, QUICK.replace(batch=8))
    chosen, losses = trainer.chosen(0), []
    for clean in (0.0, 0.5, 1.0):
        trainer.settings = trainer.settings.replace(clean=clean)
        losses.append(trainer.loss(0, chosen, photos[0][chosen]).item())
    assert losses[1] - losses[0] == pytest.approx((losses[2] - losses[0]) / 2, rel=1e-3)
    assert losses[2] > losses[0]


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
    batch, eps = batch_of(encoder, encoder, photos, class_features), 4 / 255
    unit = torch.rand(batch.pixels.shape, generator=draws())
    ours = attacked(METHODS["fare"], batch, eps, 2, unit)
    start = (batch.pixels + eps * (2 * unit - 1)).clamp(0, 1)
    theirs = released_fare_attack(encoder, batch.pixels, batch.original_clean, start, eps)
    # Slopes within rounding of zero may have either sign.
    assert ((ours - theirs).abs() < 1e-6).float().mean() > 0.999


@pytest.mark.parametrize("name", METHODS)
def test_the_inner_attack_climbs_inside_its_ball(
    name: str, encoder: rc.Encoder, photos: Any, class_features: Tensor
) -> None:
    method, batch = METHODS[name], batch_of(encoder, encoder, photos, class_features, count=24)
    unit = torch.rand(2, *batch.pixels.shape, generator=draws())
    images = attacked(method, batch, 2 / 255, 2, unit[0])
    assert 1.9 / 255 < (images - batch.pixels).abs().max() <= 2 / 255 + 1e-7
    assert not images.requires_grad
    random = (batch.pixels + (2 * unit[1] - 1) * 2 / 255).clamp(0, 1)
    with torch.no_grad():
        climbed = method.objective(batch, encoder.raw(images)) > method.objective(batch, encoder.raw(random))
    assert climbed.float().mean() > 0.9


# ---------------------------------------------------------------------- training


@pytest.fixture(scope="module", params=METHODS)
def trained(
    request: pytest.FixtureRequest,
    encoder: rc.Encoder,
    photos: Any,
    class_features: Tensor,
    tmp_path_factory: pytest.TempPathFactory,
) -> Finetuned:
    out = tmp_path_factory.mktemp("trained") / request.param
    labelled = (photos[1], class_features) if METHODS[request.param].needs_labels else (None, None)
    settings = QUICK.replace(lr=FAST[request.param][0])
    return finetune(encoder, request.param, photos[0], *labelled, out=out, settings=settings)


def test_the_loss_falls_and_only_the_image_tower_moves(
    trained: Finetuned, encoder: rc.Encoder, tiny_folder: Path
) -> None:
    rows = read_log(trained.folder / "log.csv")
    assert [row.step for row in rows] == list(range(1, 13))
    assert sum(row.loss for row in rows[-3:]) / 3 < FAST[trained.record["method"]][1] * rows[0].loss
    assert trained.record["final_loss"] == pytest.approx(sum(row.loss for row in rows[-2:]) / 2)
    before, after = rc.load(tiny_folder, device="cpu").tower.state_dict(), trained.encoder.tower.state_dict()
    assert all(torch.equal(encoder.tower.state_dict()[key], before[key]) for key in before), "the given one is kept"
    assert all(not torch.equal(after[key], before[key]) for key in before)
    assert torch.equal(trained.encoder.encode_text(["a cat"]), encoder.encode_text(["a cat"]))
    loaded = rc.load(trained.folder, device="cpu")
    pixels = torch.rand(2, 3, tiny_clip.SIZE, tiny_clip.SIZE, generator=draws())
    assert torch.equal(loaded(pixels), trained.encoder(pixels))
    assert not any(weight.requires_grad for weight in trained.encoder.parameters())


# ---------------------------------------------------------------------- photos


def test_every_photo_is_seen_once_in_a_pass() -> None:
    seen = torch.cat([photos_of(step, 24, QUICK.replace(batch=10)) for step in range(12)])
    assert seen.view(5, 24).sort(dim=1).values.equal(torch.arange(24).expand(5, -1))
    assert not torch.equal(seen[:24], seen[24:48])
    assert not torch.equal(photos_of(0, 24, QUICK.replace(batch=10, seed=1)), seen[:10])
    assert len(photos_of(0, 24, QUICK.replace(batch=100))) == 100, "a batch larger than the set goes round"


def changed(pixels: Tensor, crop: tuple[float, float] = (1.0, 1.0), cutmix: float = 0.0) -> Tensor:
    return augmented(pixels, tiny_clip.SIZE, crop, cutmix, torch.rand(4, len(pixels), generator=draws()), draws(1))


def test_augmentation_mirrors_half_crops_inside_and_exchanges_a_rectangle(photos: Any) -> None:
    size, pixels = tiny_clip.SIZE, (photos[0].float() / 255).repeat(4, 1, 1, 1)
    mirrored = changed(pixels)
    flipped = (mirrored == pixels.flip(3)).flatten(1).all(1)
    assert ((mirrored == pixels).flatten(1).all(1) ^ flipped).all()
    assert 0.3 < flipped.float().mean() < 0.7
    larger = torch.nn.functional.pad(pixels, (2, 2, 2, 2))
    assert torch.equal(changed(larger), mirrored), "without crops it is the centre"
    ramp = torch.linspace(0, 1, size + 4).expand(len(pixels), 3, size + 4, -1)
    cropped = changed(ramp, (0.5, 0.8))
    assert cropped.shape == pixels.shape
    span = cropped.amax((1, 2, 3)) - cropped.amin((1, 2, 3))
    assert 0.45 < span.min() < 0.55
    assert 0.7 < span.max() < 0.81
    plain = torch.arange(5.0)[:, None, None, None].expand(5, 3, size, size) / 4
    mixed = changed(plain, cutmix=1.0)
    assert [image.unique().tolist() for image in mixed] == [[0, 0.25], [0, 0.25], [0.5, 0.75], [0.5, 0.75], [1.0]]


def test_what_cannot_be_trained_is_refused(
    encoder: rc.Encoder, photos: Any, class_features: Tensor, tmp_path: Path
) -> None:
    pixels, labels = photos

    def refused(
        message: str, *arguments: Any, model: rc.Encoder = encoder, method: str = "tecoa", **changes: Any
    ) -> None:
        with pytest.raises(rc.ReactClipError, match=message):
            finetune(model, method, *arguments, out=tmp_path / "out", settings=QUICK.replace(**changes))

    refused("tecoa needs labels; .*fare", pixels)
    refused("pmg-aft needs class_features", pixels, labels, method="pmg-aft")
    refused(r"shape \[24, 3, 20, 32\]", pixels[:, :, :20], labels, class_features)
    refused("24 photos need one class index each", pixels, labels[:3], class_features)
    refused("from 0 to 3; 24 photos need one class index each, from 0 to 1", pixels, labels, class_features[:2])
    refused(r"class features have shape \[4, 5\]", pixels, labels, class_features[:, :5])
    refused("cutmix mixes photos of several classes", pixels, labels, class_features, cutmix=0.5)
    refused("load fp32, and compute in bf16", pixels, model=rc.load(encoder.name, device="cpu", dtype="bf16"))
    assert not (tmp_path / "out").exists()
    with pytest.raises(rc.ReactClipError, match="image tower"):
        finetune(ToyEncoder(), "fare", torch.zeros(2, 3, 16, 16), out=tmp_path / "toy")
    with pytest.raises(rc.ReactClipError, match="warmup is 300; it lies in 0 to 299"):
        Settings(steps=300, warmup=300)
