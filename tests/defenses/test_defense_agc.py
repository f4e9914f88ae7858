"""AGC: equal to the released arithmetic image by image, its perspective views, and its gradients."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from literal import Array, unit
from react_clip import noise
from react_clip.defenses import AGC, agc
from toys import toy_classifier, toy_images

from .conftest import F64


def literal_agc(x: Array, views: list[Array], c: AGC) -> tuple[Array, float, float]:
    """The released correction of one image: corrected feature, score and angle."""
    attack = min(max(float(np.mean([1 - v @ x for v in views])), 0.0), 1.0)
    pairs = [v @ w for i, v in enumerate(views) for j, w in enumerate(views) if i != j]
    trust = min(max((float(np.mean(pairs)) + 1) / 2, 0.0), 1.0) if pairs else 1.0
    score = min(max(attack**c.gamma * trust, 0.0), 1.0)
    beta = c.beta_clean + (c.beta_adv - c.beta_clean) * score
    anchor = unit(np.mean(views, 0))
    theta = math.acos(min(max(float(x @ anchor), -1 + 1e-8), 1 - 1e-8))
    if theta < 1e-6:
        return x, score, theta
    tangent = anchor - (x @ anchor) * x
    tangent = tangent / max(float(np.linalg.norm(tangent)), 1e-8)
    return unit(math.cos(beta * theta) * x + math.sin(beta * theta) * tangent), score, theta


@pytest.mark.parametrize("guard", [AGC(views=5), AGC(views=1), AGC(views=8, beta_adv=4.0, gamma=2.0)], ids=str)
def test_it_equals_the_released_arithmetic(guard: AGC) -> None:
    clf, images = toy_classifier(F64), toy_images(4, dtype=F64)
    out, keys = guard(clf, images, seed=3), noise.stream_keys(images, 3)
    for i in range(len(images)):
        streams = [noise.fork(keys[i : i + 1], number) for number in range(guard.views)]
        views = [clf.encoder.encode(agc.perspective_views(images[i : i + 1], s))[0].numpy() for s in streams]
        feature, score, angle = literal_agc(clf.encoder(images[i : i + 1])[0].numpy(), views, guard)
        assert out.features[i].tolist() == pytest.approx(feature, abs=1e-9)
        assert out.score[i].item() == pytest.approx(score, abs=1e-12)
        assert out.drift[i].item() == pytest.approx(angle, abs=1e-9)


def test_the_map_sends_the_moved_corners_to_those_of_the_image() -> None:
    starts = torch.tensor([[[0.0, 0.0], [15.0, 0.0], [15.0, 15.0], [0.0, 15.0]]], dtype=F64)
    ends = torch.tensor([[[2.0, 1.0], [14.0, 0.0], [12.0, 13.0], [0.0, 15.0]]], dtype=F64)
    homography = torch.cat([agc._perspective(ends, 15.0)[0], torch.ones(1)]).reshape(3, 3)
    sent = torch.cat([ends[0], torch.ones(4, 1)], 1) @ homography.T
    assert torch.allclose(sent[:, :2] / sent[:, 2:], starts[0], atol=1e-9)


def test_views_are_those_of_pillow_on_a_smooth_image() -> None:
    """Both sample with cubic kernels, whose parameters differ; on a smooth image that hardly matters."""
    wave = torch.linspace(0, 3, 64, dtype=F64)
    plane = 0.5 + 0.2 * torch.sin(wave)[:, None] + 0.2 * torch.cos(1.3 * wave)[None, :]
    ends = torch.tensor([[[10.0, 3.0], [55.0, 12.0], [60.0, 50.0], [1.0, 62.0]]], dtype=F64)
    coefficients = agc._perspective(ends, 63.0)
    ours = agc._warp(plane.expand(1, 3, 64, 64), coefficients)[0, 0].numpy()
    picture = Image.fromarray(plane.float().numpy())
    theirs = np.asarray(
        picture.transform(picture.size, Image.Transform.PERSPECTIVE, coefficients[0].tolist(), Image.Resampling.BICUBIC)
    )
    assert ((ours == 0) == (theirs == 0)).mean() > 0.999, "black comes in at the same places"
    assert 0.2 < (theirs == 0).mean() < 0.6
    assert np.abs(ours - theirs).max() < 2e-3


def test_corners_move_inwards_in_whole_pixels_and_reach_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    solve = agc._perspective
    monkeypatch.setattr(agc, "_perspective", lambda ends, last: seen.append(ends) or solve(ends, last))
    agc.perspective_views(toy_images(1).expand(300, 3, 16, 16), torch.arange(300))
    top_left, top_right, bottom_right, bottom_left = seen[0].unbind(1)
    near, far = list(range(5)), list(range(11, 16))
    for corner, (x, y) in [(top_left, (near, near)), (top_right, (far, near)), (bottom_right, (far, far))]:
        assert corner[:, 0].unique().tolist() == x
        assert corner[:, 1].unique().tolist() == y
    assert bottom_left[:, 1].unique().tolist() == far
