"""Each attack against a second implementation, its formula or its published settings."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from react_clip import linf, noise
from react_clip.attacks import APGD, DIFGSM, PGD, Attack, AutoAttack, Square
from react_clip.attacks.fab import onto_plane
from react_clip.attacks.losses import cross_entropy, margin
from react_clip.attacks.problem import Candidates, run_in_turn

from .conftest import Record, Task, problem_of, sign_steps

linprog = pytest.importorskip("scipy.optimize").linprog


# ---------------------------------------------------------------------- PGD


@pytest.mark.parametrize("loss", ["ce", "margin"])
@pytest.mark.parametrize(("step_size", "step"), [(1 / 255, 1 / 255), ("eps/4", 2 / 255)])
def test_matches_a_plain_loop(task: Task, loss: str, step_size: float, step: float) -> None:
    x, y = task.x[:50], task.y[:50]
    ours = PGD(eps=8 / 255, steps=10, step_size=step_size, loss=loss)(task.net, x, y, seed=7)  # type: ignore[arg-type]

    def objective(pixels: Tensor) -> Tensor:
        logits = task.net(pixels)
        if loss == "ce":
            return F.cross_entropy(logits, y, reduction="none")
        return (logits - 1e9 * F.one_hot(y, 5)).amax(1) - logits[torch.arange(len(y)), y]

    draw = noise.uniform(noise.stream_keys(x, 7), x[0].numel()).reshape(x.shape)
    start = (x + 8 / 255 * (2 * draw - 1)).clamp(0, 1)
    theirs = linf.Ball(x, 8 / 255).on_8_bits(sign_steps(objective, x, start, 8 / 255, step, 10))
    # The bounds round differently by an ulp, which may flip the sign of a gradient that is nearly 0: a stray pixel.
    assert ((ours.images - theirs).abs() < 1e-6).float().mean() > 0.999


@pytest.mark.parametrize("smooth", [0, 7])
def test_di_fgsm_is_momentum_at_images_that_are_resized_and_padded(task: Task, smooth: int) -> None:
    """The definition for one image after the other: torch resizes, zeros pad, a kernel smooths, a loop adds up."""
    attack = DIFGSM(steps=4, smallest=0.5, probability=0.7, step_size=3 / 255, smooth=smooth, momentum=0.8)
    (x, y), eps, line = task.head(6), 8 / 255, torch.exp(-0.5 * torch.linspace(-3, 3, 15) ** 2)
    problem, sizes = problem_of(task.net, x, y, eps), set()
    kernel = (torch.outer(line, line) / line.sum() ** 2).expand(3, 1, 15, 15)
    found = attack.search(problem)
    for row, (image, label) in enumerate(zip(x.split(1), y.split(1), strict=True)):
        moved, momentum = image, torch.zeros_like(image)
        for step in range(4):
            draws = noise.uniform(problem.fork(step).keys[row : row + 1], 4)[0].tolist()
            side = 4 + int(draws[0] * 5) if draws[3] < 0.7 else 8
            left, top = (int(place * (9 - side)) for place in draws[1:3])
            pixels = moved.clone().requires_grad_()
            small = F.interpolate(pixels, size=(side, side), mode="bilinear", align_corners=False)
            padded = F.pad(small, (left, 8 - side - left, top, 8 - side - top))
            (slope,) = torch.autograd.grad(F.cross_entropy(task.net(padded), label), pixels)
            slope = F.conv2d(slope, kernel, padding="same", groups=3) if smooth else slope
            momentum = 0.8 * momentum + slope / slope.abs().sum()
            moved = (moved + 3 / 255 * momentum.sign()).clamp(image - eps, image + eps).clamp(0, 1)
            sizes.add(side)
        assert (found[row] - moved[0]).abs().gt(1e-6).float().mean() < 0.02, "a sign may differ where a slope is 0"
    assert len(sizes) == 5


def test_the_summed_loss_survives_half_precision_in_a_large_batch() -> None:
    """Gradients here are 5e-7: a number in fp16. Divided by 256 images they would be 0, and nothing would move."""
    x, y = torch.full((256, 3, 2, 2), 0.5), torch.zeros(256, dtype=torch.long)
    tiny = torch.tensor(1e-6, dtype=torch.float16)

    def model(x: Tensor) -> Tensor:
        first = (x.half() * tiny).flatten(1).sum(1)
        return torch.stack([first, torch.zeros_like(first)], 1)

    result = PGD(eps=4 / 255, steps=10)(model, x, y)
    torch.testing.assert_close(result.images, x.mul(255).sub(4).ceil().div(255))  # 123.5: the next level inside


# ---------------------------------------------------------------------- APGD


def test_each_restart_has_its_own_start(task: Task) -> None:
    x, y = task.head(1)
    record = Record(task.net)
    result = APGD(eps=1e-4, steps=1, restarts=3)(record, x, y)
    assert not result.success
    starts = torch.cat(record.seen[1:-2:2])
    assert len(starts) == 3
    assert bool((torch.pdist(starts.flatten(1)) > 1e-4).all())


def test_eot_averages_gradient_loss_and_logits() -> None:
    """A model that goes through four heads in turn: four passes must give their exact mean."""
    generator = torch.Generator().manual_seed(1)
    heads = torch.randn(4, 3, 12, generator=generator)
    x, y = torch.rand(2, 3, 2, 2, generator=generator), torch.tensor([0, 2])
    calls = 0

    def model(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x.flatten(1) @ heads[calls % 4].T

    problem = problem_of(model, x, y, 0.1)
    logits, value, gradient = problem.gradient(x, cross_entropy, eot=4)
    pixels = x.clone().requires_grad_()
    each = torch.stack([cross_entropy(pixels.flatten(1) @ head.T, y) for head in heads])
    torch.testing.assert_close(gradient, torch.autograd.grad(each.mean(0).sum(), pixels)[0])
    torch.testing.assert_close(value, each.mean(0).detach())
    torch.testing.assert_close(logits, x.flatten(1) @ heads.mean(0).T)
    assert problem.spent.tolist() == [[4, 4], [4, 4]]


# ---------------------------------------------------------------------- FAB


@pytest.mark.parametrize("seed", range(40))
def test_onto_plane_is_the_optimum_of_the_linear_program(seed: int) -> None:
    """min s subject to |d_i| <= s, 0 <= x + d <= 1, w.d = -h, solved by a general solver."""
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 9))
    x, w = rng.random(size), rng.normal(size=size) * (rng.random(size) < 0.8)
    x[rng.random(size) < 0.2] = rng.integers(2)
    h = rng.normal() * rng.choice([0.01, 0.3, 3.0])
    shape = (1, 1, 1, size)
    d = onto_plane(*(torch.tensor(v, dtype=torch.float64).reshape(shape) for v in (x, w)), torch.tensor([h]))
    move = d.flatten().numpy()
    assert ((x + move >= -1e-9) & (x + move <= 1 + 1e-9)).all()

    ones = np.ones((size, 1))
    bounds = [(-a, 1 - a) for a in x] + [(0, None)]
    within = np.block([[np.eye(size), -ones], [-np.eye(size), -ones]])
    best = linprog(
        np.r_[np.zeros(size), 1], within, np.zeros(2 * size), np.r_[w, 0][None], [-h], bounds=bounds, method="highs"
    )
    if best.success:
        assert w @ move == pytest.approx(-h, abs=1e-6)
        assert np.abs(move).max() == pytest.approx(best.fun, abs=1e-6)
    else:  # the plane is out of reach: every pixel that counts goes to its end
        reach = np.where(-w * np.sign(h) > 0, 1 - x, -x) * (w != 0)
        assert move == pytest.approx(reach, abs=1e-9)


# ---------------------------------------------------------------------- AutoAttack


def test_a_tie_is_broken_if_argmax_is_wrong() -> None:
    """Classes with one and the same name tie exactly; argmax decides, and so must the attacks in turn."""
    x, y = torch.full((1, 1, 1, 1), 0.5), torch.tensor([1])
    clean, tied = torch.tensor([[0.0, 1.0, 1.0]]), torch.tensor([[1.0, 1.0, 0.0]])
    best = Candidates.judged(x, clean, y)
    assert best.wrong.item() == 0
    attempts = [lambda part, rows: Candidates.judged(part.x - 0.25, tied, part.y)]
    best = run_in_turn(problem_of(lambda x: x, x, y, 0.5), best, attempts)
    assert best.images.item() == 0.25
    assert best.wrong.item() == 1


@pytest.mark.parametrize(
    ("attack", "least", "most"),
    [
        # The clean pass and the two that judge, and for each restart the start and 10 steps.
        (APGD(steps=10, restarts=3), 3 + 11, 3 + 3 * 11),
        # The same; for each member that ran the clean pass, start, 100 steps and its outcome.
        (AutoAttack(version="ttc"), 3 + 103, 3 + 2 * 103),
        (Square(queries=150), None, 3 + 150),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_broken_images_are_left_alone(attack: Attack, least: int | None, most: int, task: Task) -> None:
    x, y = task.clear_cut(5)
    result = attack(task.net, x, y, eps=8 / 255)
    assert result.success.tolist() == [True] * 5 + [False] * 5
    assert result.queries[5:].tolist() == [most] * 5
    if least is not None:
        assert result.queries[:5].tolist() == [least] * 5
    if isinstance(attack, AutoAttack):
        met = {name: [None if bool(one.isnan()) else float(one) for one in part] for name, part in result.parts.items()}
        assert met == {"1 of 2: apgd-ce-100": [1.0] * 5 + [0.0] * 5, "2 of 2: apgd-dlr-100": [None] * 5 + [0.0] * 5}
    assert int(result.queries[:5].max()) < most


@pytest.mark.parametrize("lead", [0.0, 2.0])
def test_a_stopped_image_stays_where_it_first_succeeded(task: Task, lead: float) -> None:
    x, y = task.x[:50], task.y[:50]
    problem = problem_of(task.net, x, y, 16 / 255)
    stopped = PGD(steps=20, stop="success", margin=lead).search(problem)
    whole = PGD(steps=20).search(problem)
    reached = margin(task.net(whole), y) >= lead + 1
    assert reached.sum() > 10, "images must pass the margin by far for this test to say anything"
    at_stop, at_end = (margin(task.net(images), y)[reached] for images in (stopped, whole))
    # The last step passed the margin; one more step of all twenty would have gone on.
    assert (at_stop >= lead - 1e-4).all()
    assert (at_stop < at_end).float().mean() > 0.9
