"""DBD: equal to the released arithmetic image by image, its 31 views, and its gradients."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from literal import Array, softmax, unit
from react_clip import noise
from react_clip.defenses import DBD, dbd
from toys import toy_classifier, toy_images

from .conftest import F64


def literal_dbd(x: Array, views: Array, classes: Array, c: DBD) -> tuple[Array, float]:
    """The released correction of one image: corrected feature and score."""
    entropies = []
    for view in views:
        p = softmax(100 * classes @ view)
        entropies.append(-sum(q * np.log(q) for q in p if q > 0))
    sure = np.argsort(entropies, kind="stable")[: c.selected]
    drifts = views[sure] - x
    mean = drifts.mean(0)
    lengths = np.linalg.norm(drifts, axis=1) + 1e-8
    score = float(np.mean(drifts @ mean / lengths)) / (np.linalg.norm(mean) + 1e-8)
    return unit(x + (c.alpha if score > c.threshold else 1.0) * mean), score


@pytest.mark.parametrize("selected", [16, 31, 1])
def test_it_equals_the_released_arithmetic(selected: int) -> None:
    clf, images = toy_classifier(F64), toy_images(4, dtype=F64)
    guard = DBD(selected=selected)
    if selected > 1:
        # Between the images, so that both strengths are tried.
        guard = guard.replace(threshold=float(guard(clf, images, seed=3).score.sort().values[1:3].mean()))
    out, keys = guard(clf, images, seed=3), noise.stream_keys(images, 3)
    assert selected == 1 or 0 < out.gate_open.sum() < 4
    for i in range(len(images)):
        views = clf.encoder.encode(made(images[i : i + 1], keys[i])).numpy()
        plain = clf.encoder(images[i : i + 1])[0].numpy()
        feature, score = literal_dbd(plain, views, clf.class_features.numpy(), guard)
        assert out.features[i].tolist() == pytest.approx(feature, abs=1e-7)
        assert out.score[i].item() == pytest.approx(score, abs=1e-7)


def made(image: Tensor, key: Tensor) -> Tensor:
    """The 31 views of one image."""
    crops = [dbd.CROPS(image, noise.fork(key[None], number)) for number in range(dbd.CROP_COUNT)]
    others = [make(image, noise.fork(key[None], 16 + number)) for number, make in enumerate(dbd.OPERATIONS)]
    return torch.cat([*crops, *others])


def window(plane: Array, row: int, column: int, mode: str) -> Array:
    padded = np.pad(plane, 2, mode=mode)
    return padded[row : row + 5, column : column + 5]


def views_of(image: Tensor) -> Array:
    return made(image[None], torch.tensor(7)).numpy()


def test_views_are_what_the_released_code_makes_of_8_bit_images() -> None:
    levels = (255 * toy_images(1, dtype=F64)[0]).round()
    levels[0, 0, :4] = torch.tensor([255.0, 240.0, 239.0, 225.0])
    views, image = views_of(levels / 255), levels.numpy()
    for number, rounding in ((16, np.floor), (17, np.round), (18, np.ceil)):
        expected = (rounding(image / 32) * 32).astype(int).astype(np.uint8)
        assert np.allclose(255 * views[number], expected)
    assert (views[17][0, 0, :4] > 0).tolist() == [False, False, True, True], "256 wraps around to black"
    for number, quality in ((19, 50), (20, 60), (21, 75)):
        file = io.BytesIO()
        Image.fromarray(image.transpose(1, 2, 0).astype(np.uint8)).save(file, "JPEG", quality=quality)
        assert np.allclose(255 * views[number], np.array(Image.open(file)).transpose(2, 0, 1))
    binomial = np.outer([1, 4, 6, 4, 1], [1, 4, 6, 4, 1]) / 256
    for row, column in ((0, 0), (0, 9), (7, 8), (15, 15)):
        for channel in range(3):
            plane, at = image[channel] / 255, (channel, row, column)
            assert views[28][at] == pytest.approx(np.median(window(plane, row, column, "edge")))
            assert views[29][at] == pytest.approx(window(plane, row, column, "reflect").mean())
            assert views[30][at] == pytest.approx((binomial * window(plane, row, column, "reflect")).sum())
