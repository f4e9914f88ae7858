"""Transfer, universal, label-free, targeted, L2, patch and typographic attacks against second implementations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

import react_clip as rc
from react_clip import linf, noise
from react_clip.attacks import (
    APGD,
    DIFGSM,
    L2PGD,
    PGD,
    Attack,
    Corruption,
    LabelFree,
    Patch,
    Square,
    Targeted,
    Universal,
)
from react_clip.attacks.balls import EuclideanBall
from react_clip.attacks.problem import check_in_ball
from react_clip.attacks.universal import read_perturbation
from react_clip.errors import ReactClipError
from toys import patch_encoder, write_photos

from .conftest import Task, problem_of, sign_steps

EPS = 8 / 255


def apart(one: Tensor, other: Tensor) -> float:
    """Fraction of pixels that differ: a sign may where a gradient is 0."""
    return float(((one - other).abs() > 1e-5).float().mean())


@pytest.fixture(scope="module")
def patches() -> tuple[Any, Tensor, Tensor]:
    """A classifier on a vision transformer of 32 pixels, images, and its answers on them."""
    generator = torch.Generator().manual_seed(2)
    encoder, features = patch_encoder(), torch.randn(4, 12, generator=generator)
    clf = rc.ZeroShotClassifier.from_features(encoder, [f"class {i}" for i in range(4)], features)
    x = torch.rand(3, 3, 32, 32, generator=generator)
    return clf, x, clf(x).argmax(1)


def test_a_gradient_that_is_zero_at_the_start_is_noted(task: Task) -> None:
    x, y = task.head(2)
    first = torch.tensor([1.0, 0.0])[:, None]

    def half_flat(images: Tensor) -> Tensor:
        return task.net(images) * first[: len(images)]

    assert PGD(steps=2)(half_flat, x, y).flat.tolist() == [0.0, 1.0]
    assert Square(queries=2)(half_flat, x, y).flat.isnan().all()


# ---------------------------------------------------------------------- momentum, smoothing, sizes


def test_sizes_add_the_gradients_of_the_tower_at_each(patches: Any) -> None:
    clf, x, y = patches
    attack = DIFGSM(eps=EPS, steps=1, step_size=EPS, probability=0, sizes=(0.5, 0.75, 1))

    def objective(pixels: Tensor) -> Tensor:
        sizes = [F.interpolate(pixels, (side, side), mode="bilinear", antialias=True) for side in (16, 24, 32)]
        losses = [F.cross_entropy(clf.logits(clf.encoder.encode(each)), y, reduction="none") for each in sizes]
        return torch.stack(losses).sum(0)

    expected = sign_steps(objective, x, x, EPS, EPS, 1)
    assert apart(attack.search(problem_of(clf, x, y, EPS)), expected) < 0.01
    with pytest.raises(ReactClipError, match="sizes need a classifier whose tower takes images of any size"):
        attack(lambda images: clf(images), x, y)


# ---------------------------------------------------------------------- label-free and targeted


@pytest.mark.parametrize("features", ["image", "patches"])
def test_label_free_lowers_the_cosine_step_by_step(features: Any, patches: Any) -> None:
    clf, x, y = patches
    encode = clf.encoder if features == "image" else clf.encoder.patch_tokens
    clean, attack = encode(x), LabelFree(features=features, by=PGD(steps=4, step_size=2 / 255))
    problem = problem_of(clf, x, y, EPS)

    def objective(pixels: Tensor) -> Tensor:
        return -F.cosine_similarity(encode(pixels), clean, dim=-1).reshape(len(x), -1).sum(1)

    expected = sign_steps(objective, x, problem.random_start(), EPS, 2 / 255, 4)
    assert apart(attack.search(problem), expected) < 0.01
    images = attack(clf, x, y, eps=EPS).images
    assert torch.equal(images, attack(clf, x, 0 * y, eps=EPS).images), "labels play no part"
    drop = [F.cosine_similarity(encode(at), clean, dim=-1).mean() for at in (x, images)]
    assert drop[1] < drop[0] - 0.01
    longer = LabelFree(features=features, by=APGD(steps=40))(clf, x, y, eps=EPS).images
    assert F.cosine_similarity(encode(longer), clean, dim=-1).mean() < drop[1]


def test_patch_tokens_are_those_behind_the_feature(patches: Any, toy: Any) -> None:
    encoder, x = patches[0].encoder, patches[1]
    tokens = encoder.tower.tokens(encoder._normalise(x))
    torch.testing.assert_close(tokens[:, 0] @ encoder.tower.proj, encoder.raw(x))
    assert torch.equal(encoder.patch_tokens(x), tokens[:, 1:])
    clf, x, y = toy
    with pytest.raises(ReactClipError, match="'toy' gives no patch tokens; a vision transformer of CLIP does"):
        LabelFree(features="patches")(clf, x, y)
    with pytest.raises(ReactClipError, match="attacks features; give a ZeroShotClassifier, not a DefendedModule"):
        LabelFree()(rc.as_module(clf, rc.Undefended()), x, y)


def test_targeted_climbs_the_cross_entropy_of_its_class(task: Task) -> None:
    x, y = task.head(20)
    problem, aim = problem_of(task.net, x, y, EPS), torch.full_like(y, 2)

    def objective(pixels: Tensor) -> Tensor:
        return -F.cross_entropy(task.net(pixels), aim, reduction="none")

    expected = sign_steps(objective, x, problem.random_start(), EPS, 2 / 255, 5)
    found = Targeted(target_class=2, by=PGD(steps=5, step_size=2 / 255)).search(problem)
    assert apart(found, expected) < 0.03
    strong = Targeted(target_class=2, by=APGD(loss="dlr", steps=30))(task.net, x, y, eps=24 / 255)
    assert (task.net(strong.images).argmax(1) == 2).float().mean() > 0.9
    with pytest.raises(ReactClipError, match="target_class is 5, but the model has only classes 0 to 4"):
        Targeted(target_class=5)(task.net, x, y)


@pytest.mark.parametrize("inner", [Square(eps=0.5), L2PGD(), Corruption(), rc.attacks.Rand()], ids=lambda one: one.name)
def test_attacks_that_cannot_be_inside_are_refused(inner: Attack) -> None:
    with pytest.raises(ReactClipError, match=r"cannot use .* name an attack such as pgd or apgd, and give eps to the"):
        LabelFree(by=inner)


# ---------------------------------------------------------------------- other balls


def test_l2_pgd_equals_a_plain_loop(task: Task) -> None:
    x, y = task.head(10)
    problem = problem_of(task.net, x, y, 1.0)
    problem = rc.attacks.Problem(**{**vars(problem), "ball": EuclideanBall(x, problem.ball.eps)})
    moved = problem.random_start()
    for _ in range(6):
        pixels = moved.clone().requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(task.net(pixels), y, reduction="sum"), pixels)
        for row in range(len(x)):
            step = moved[row] + 0.25 * slope[row] / slope[row].norm() - x[row]
            moved[row] = (x[row] + step * min(1.0, 1.0 / float(step.norm()))).clamp(0, 1)
    found = L2PGD(steps=6).search(problem)
    torch.testing.assert_close(found, moved, atol=1e-4, rtol=0)
    assert ((found - x).flatten(1).norm(dim=1) <= 1 + 1e-5).all()


@pytest.mark.parametrize("eps", [0.02, 0.5, 3.0])
def test_l2_images_of_8_bits_stay_in_the_ball_and_keep_its_power(eps: float) -> None:
    x = torch.randint(256, (3, 3, 32, 32), generator=torch.Generator().manual_seed(0)) / 255
    ball = EuclideanBall(x, torch.full((3, 1, 1, 1), eps))
    images = ball.random_start(torch.arange(3))
    rounded = ball.on_8_bits(images)
    assert (ball.excess(rounded) <= 1e-6).all()
    assert ((255 * rounded - (255 * rounded).round()).abs() < 1e-4).all()
    move, wanted = ((at - x).flatten(1) for at in (rounded, images))
    assert (move.norm(dim=1) > 0.9 * eps - 1 / 255).all(), "the budget is used"
    if eps > 1 / 255:
        assert (F.cosine_similarity(move, wanted) > (0.95 if eps == 3.0 else 0.2)).all()
    with pytest.raises(ReactClipError, match=r"photo \d of the batch exceeds the budget by"):
        check_in_ball((x + 2 * eps / x[0].numel() ** 0.5).clamp(0, 1), ball, "mine")


def test_l2_budgets_may_exceed_one_pixel(task: Task) -> None:
    x, y = task.head(2)
    assert L2PGD(eps="3.0").eps == 3.0  # type: ignore[arg-type]
    moved = (L2PGD(eps=5.0, steps=20)(task.net, x, y).images - x).flatten(1).norm(dim=1)
    assert ((moved > 3) & (moved <= 5 + 1e-5)).all()
    with pytest.raises(ReactClipError, match="eps is 101"):
        L2PGD(eps=101.0)


def test_a_patch_is_one_square_of_the_area_at_a_random_place() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(60, 200, (40, 3, 30, 30), generator=generator) / 255
    y = torch.zeros(40, dtype=torch.long)
    weight = torch.randn(3 * 30 * 30, 2, generator=generator)
    attack = Patch(steps=20)
    result = attack(lambda images: images.flatten(1) @ weight, x, y, seed=1)
    changed = (result.images != x).any(1)
    places = set()
    for mask in changed:
        rows, columns = mask.any(1).nonzero().flatten(), mask.any(0).nonzero().flatten()
        assert rows[-1] - rows[0] < 6, "6 x 6 of 900 pixels are 4 %, 7 x 7 would be 5.4 %"
        assert columns[-1] - columns[0] < 6
        places.add((int(rows[0]), int(columns[0])))
    assert (changed.flatten(1).float().mean(1) <= 0.05).all()
    assert len(places) > 30
    one = attack.ball(x[:1], torch.ones(1, 1, 1, 1), noise.stream_keys(x[:1], 1))
    with pytest.raises(ReactClipError, match="left its budget"):
        check_in_ball((x[:1] + 0.1 * (one.eps == 0)).clamp(0, 1), one, attack.name)  # type: ignore[union-attr]


# ---------------------------------------------------------------------- one perturbation for all


def test_a_perturbation_is_read_scaled_and_added(tmp_path: Path, patches: Any) -> None:
    clf, x, y = patches
    delta = 12 / 255 * torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(1)).sign()
    save_file({"delta": delta}, tmp_path / "model.safetensors")
    torch.save(delta[0], tmp_path / "delta.pth")
    torch.save({"delta_param": delta.atanh()}, tmp_path / "l2.pt")
    for name in ("model.safetensors", "delta.pth", "l2.pt"):
        torch.testing.assert_close(read_perturbation(tmp_path / name), delta[0])
        result = Universal(file=str(tmp_path / name))(clf, x, y, eps=torch.tensor([0.0, 4 / 255, 8 / 255]))
        expected = linf.Ball(x, 0).on_8_bits(x)
        expected = torch.stack([x[0], *((x[i] + k / 255 * delta[0].sign()).clamp(0, 1) for i, k in ((1, 4), (2, 8)))])
        assert (result.images - expected).abs().max() < 1.01 / 255
    double = F.interpolate(x, (64, 64))
    save_file({"delta": delta, "other": delta + 1}, tmp_path / "two.safetensors")
    moved = Universal(file=str(tmp_path / "two.safetensors")).search(problem_of(lambda at: at, double, y, EPS)) - double
    assert moved.abs().max() == pytest.approx(EPS, abs=1e-6)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"a": torch.ones(3, 4, 4), "b": torch.ones(2)}, r"holds a \(3, 4, 4\), b \(2,\)"),
        ({"delta": torch.zeros(3, 4, 4)}, "that is not zero"),
        ({"delta": torch.full((3, 4, 4), torch.nan)}, "one finite 'delta'"),
        ({"delta": print}, "holds more than tensors"),
    ],
)
def test_files_without_a_perturbation_are_refused(content: Any, words: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "delta.pt")
    with pytest.raises(ReactClipError, match=words):
        read_perturbation(tmp_path / "delta.pt")


def test_another_perturbation_is_another_attack(tmp_path: Path) -> None:
    """Attacked images are kept by the attack's repr."""
    attack = Universal(file=str(tmp_path / "delta.safetensors"))
    seen = set()
    for size in (4, 4, 8):
        save_file({"delta": torch.ones(3, size, size)}, attack.file)
        seen.add(repr(attack))
    assert len(seen) == 2
    with pytest.raises(ReactClipError, match="cannot be read"):
        repr(attack.replace(file=str(tmp_path / "none.safetensors")))
    for fields in ({}, {"file": "a.pt", "photos": "b"}):
        with pytest.raises(ReactClipError, match="needs a file or photos, not both"):
            Universal(**fields)  # type: ignore[arg-type]


def test_a_fit_lowers_cosines_of_photos_that_it_has_not_seen(
    tmp_path: Path, patches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clf, x, y = patches
    folder = write_photos(tmp_path / "train", count=6)
    attack = Universal(photos=str(folder), steps=30, step_size=1 / 255, batch=4, eps=16 / 255)
    fits: list[Tensor] = []
    fit = Universal.fit
    monkeypatch.setattr(Universal, "fit", lambda self, encoder: fits.append(fit(self, encoder)) or fits[-1])
    images, half = (attack(clf, x, y, eps=eps).images for eps in (16 / 255, 8 / 255))
    assert len(fits) == 1, "it is fitted once and then applied"
    random = (x + 16 / 255 * torch.randn(x.shape, generator=torch.Generator().manual_seed(3)).sign()).clamp(0, 1)
    clean = clf.encoder(x)
    away = [float((clf.encoder(at) * clean).sum(1).mean()) for at in (random, half, images)]
    assert away[2] < away[0] - 0.05, away
    assert away[2] < away[1]
    save_file({"delta": fits[0]}, tmp_path / "delta.safetensors")
    assert torch.equal(Universal(file=str(tmp_path / "delta.safetensors"), eps=16 / 255)(clf, x, y).images, images)
    with pytest.raises(ReactClipError, match="holds no photos"):
        Universal(photos=str(tmp_path / "nothing"))(clf, x, y)
    with pytest.raises(ReactClipError, match="fits on the features of a classifier"):
        attack(lambda at: clf(at), x, y)


# ---------------------------------------------------------------------- text


def test_the_name_of_another_class_is_written() -> None:
    grey = (torch.arange(100, 130) / 255).reshape(30, 1, 1, 1).expand(30, 3, 128, 128)
    labels, attack = torch.arange(30) % 3, Corruption(type="text", severity=0.2)

    def named(images: Tensor) -> Tensor:
        return images.mean((2, 3))

    with pytest.raises(ReactClipError, match="text writes the name of another class; give a ZeroShotClassifier"):
        attack(named, grey, labels)
    named.names = ["tree", "cat", "rather a long name"]  # type: ignore[attr-defined]
    images = attack(named, grey, labels, seed=3).images
    assert not torch.equal(images, attack(named, grey, labels, seed=4).images)
    for part in ((images > 0.8).all(1), (images < 0.2).all(1)):
        assert (part.flatten(1).sum(1) > 50).all(), "white letters with a black rim"
        assert (part.flatten(1).float().mean(1) < 0.3).all()
    wide = ((images - grey).abs() > 0.01).any(1).any(1).sum(1)
    # Of the classes that are not an image's own both are written; the long name spans the photo.
    assert {bool(value) for value in wide[labels == 0] > 100} == {True, False}
    assert (wide[labels == 2] < 100).all(), "its own name is never written"
