"""Random streams: standard normal, independent, and the same bits in every batch, thread and device."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from react_clip import noise
from react_clip.attacks import Corruption
from react_clip.augment import JitterFirst, Motion, WeakAugmentation, smaller_copy
from react_clip.defenses.agc import perspective_views
from react_clip.defenses.augmix import AugMix
from react_clip.linf import Ball
from react_clip.preprocess import to_float
from toys import on_a_gpu, toy_images


def test_streams_are_unrelated() -> None:
    draws = noise.normal(noise.fork(noise.stream_keys(toy_images(4), 0), 3), (400_000,)).double()
    assert (torch.corrcoef(draws) - torch.eye(4)).abs().max() < 4.5 / 400_000**0.5
    half = draws[0]
    for lag in (1, 2, 3, 4, 200_000):
        assert abs((half[lag:] * half[:-lag]).mean()) < 4.5 / (len(half) - lag) ** 0.5


# First outputs of the published algorithm for seed 1234567.
SPLITMIX64 = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]


def test_the_generator_is_splitmix64() -> None:
    bits = noise._bits(torch.tensor([1234567]), 5)[0].tolist()
    assert [value % 2**64 for value in bits] == SPLITMIX64
    assert noise.uniform(torch.tensor([1234567]), 5)[0].tolist() == [
        value / 2**64 // 2**-24 / 2**24 for value in SPLITMIX64
    ]


@cache
def quantiles() -> tuple[list[float], float]:
    """Those of the middles of 2^16 equal parts, in plain Python, and their standard deviation."""
    values = [NormalDist().inv_cdf((i + 0.5) / 2**16) for i in range(2**16)]
    return values, (sum(value**2 for value in values) / 2**16) ** 0.5


@given(st.integers(-(2**63), 2**63 - 1), st.integers(1, 9))
def test_normal_numbers_are_quantiles_of_16_bits_of_the_stream(key: int, count: int) -> None:
    keys, (values, deviation) = torch.tensor([key]), quantiles()
    expected = []
    for bits in noise._bits(keys, 3)[0].tolist():
        pieces = [bits >> shift & 0xFFFF for shift in (0, 16, 32, 48)]
        expected += [values[(piece + 2**15) % 2**16] / deviation for piece in pieces]
    assert torch.equal(noise.normal(keys, (count,))[0], torch.tensor(expected[:count]))
    assert keys.item() == key, "drawing must not change the key"


def test_tables_do_not_hang_on_the_last_bit_of_the_cpu() -> None:
    """Another machine may compute quantiles that differ by 1e-15; all are rounded to the same floats."""
    exact = noise._table(noise._normal_quantiles, (), 2**16, torch.device("cpu"), torch.float64)
    for error in (1 - 1e-13, 1 + 1e-13):
        assert torch.equal((exact * error).float(), exact.float())


# ---------------------------------------------------------------------- the same bits everywhere

SIDE = 224
SECRET = b"a secret that is long enough"


def photos(count: int, side: int = SIDE) -> Tensor:
    """Half of them with 8 bits; every pixel differs from its neighbours."""
    levels = noise.uniform(torch.arange(count), 3 * side * side).reshape(-1, 3, side, side)
    return torch.where(torch.arange(count)[:, None, None, None] % 2 == 0, (255 * levels).round() / 255, levels)


def numbers(images: Tensor) -> dict[str, Tensor]:
    """Keys and numbers, of which every bit must be known."""
    keys = noise.stream_keys(images, 3)
    eps = noise.uniform(keys, 1)[:, :, None, None]
    return {
        "keys": keys,
        "secret keys": noise.stream_keys(images, SECRET),
        "branches": noise.fork(keys[:, None], torch.arange(5, device=keys.device)),
        "uniform": noise.uniform(keys, 1001),
        "normal": noise.normal(keys, (7, 143)),
        "noisy views": noise.noisy_view(images, keys, eps.flatten()),
        "start": Ball(images, 4 / 255).random_start(keys),
        "starts of their own size": Ball(images, eps).random_start(keys),
        "damaged": Corruption(type="noise", severity=0.1)._damaged(SimpleNamespace(x=images, keys=keys)),  # type: ignore[arg-type]
    }


VIEWS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "moved": Motion(),
    "moved far": Motion(rotation=180.0, translation=0.3, scale=(0.4, 2.0)),
    "smaller": lambda images, _: smaller_copy(images, 160),
    "moved and smaller": lambda images, keys: smaller_copy(Motion()(images, keys), 176),
    "cropped": AugMix(chains=0),
    "augmented": WeakAugmentation(probability=1.0),
    "augmented, jitter first": JitterFirst(),
    "perspective": perspective_views,
    "mixed": AugMix(),
}


@contextmanager
def recorded() -> Iterator[list[Tensor]]:
    """All uniform numbers and parameters that views are made of, and the places at which they are sampled."""
    seen: list[Tensor] = []

    def spy(function: Callable[..., Tensor], place: int | None) -> Callable[..., Tensor]:
        def call(*arguments: Any, **options: Any) -> Tensor:
            result = function(*arguments, **options)
            seen.append(result if place is None else arguments[place])
            return result

        return call

    with ExitStack() as patches:
        for owner, name, place in ((noise, "uniform", None), (noise, "tabulated", None), (F, "grid_sample", 1)):
            patches.enter_context(patch.object(owner, name, spy(getattr(owner, name), place)))
        yield seen


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Also tells -0.0 from 0.0."""
    return one.shape == other.shape and one.cpu().numpy().tobytes() == other.cpu().numpy().tobytes()


KNOWN = {"numbers": "797520eaa343", "parameters and places": "5a2af1948274"}
"""Starts of the SHA-256 of what 6 images get: numbers, and of all kinds of views their parameters and places."""


def test_bits_are_those_of_every_machine() -> None:
    images = photos(6)
    drawn = {"numbers": [*numbers(images).values()]}
    with recorded() as drawn["parameters and places"]:
        for make in VIEWS.values():
            make(images, drawn["numbers"][0])
    digests = {name: hashlib.sha256(b"".join(each.numpy().tobytes() for each in drawn[name])) for name in drawn}
    assert {name: digest.hexdigest()[:12] for name, digest in digests.items()} == KNOWN


@on_a_gpu
def test_a_gpu_draws_the_bits_of_the_cpu() -> None:
    images, levels = photos(6), torch.arange(256, dtype=torch.uint8)
    assert same_bits(to_float(levels.cuda()), to_float(levels))
    for (name, ours), theirs in zip(numbers(images.cuda()).items(), numbers(images).values(), strict=True):
        assert same_bits(ours, theirs), name
    keys = noise.stream_keys(images, 0)
    for name, make in VIEWS.items():
        with recorded() as ours:
            view = make(images.cuda(), keys.cuda())
        with recorded() as theirs:
            expected = make(images, keys)
        assert all(map(same_bits, ours, theirs)), name
        off, simple = (view.cpu() - expected).abs(), {"moved", "moved far", "smaller", "moved and smaller", "cropped"}
        if name == "mixed":  # where pixels that differ by 1e-7 are rounded to levels of 8 bits
            assert (off > 5e-6).float().mean() < 1e-3
        else:
            assert off.max() < (1e-6 if name in simple else 5e-6), name


def test_places_in_pixels_are_the_same_by_every_formula() -> None:
    """The CPU and CUDA compute them in different ways; a formula in single precision agrees only where it is exact."""
    images = photos(2)
    with recorded() as seen:
        for make in VIEWS.values():
            make(images, torch.arange(2))
    for grid in (each for each in seen if each.ndim == 4):
        inside = grid[grid.abs() <= 1 + 2 / SIDE]
        exact = (((inside.double() + 1) * SIDE - 1) / 2).float()
        assert torch.equal(((inside + 1) * SIDE - 1) / 2, exact)
        assert torch.equal((inside + 1) * (SIDE / 2) - 0.5, exact)


@settings(max_examples=20)
@given(st.permutations(range(6)), st.integers(1, 5))
def test_an_image_gets_the_same_bits_in_any_batch_and_order(order: list[int], split: int) -> None:
    images, expected = photos(6, 16), numbers(photos(6, 16))
    for name, each in numbers(images[order]).items():
        assert same_bits(each, expected[name][order]), name
    parts = [numbers(part) for part in images.split(split)]
    for name, each in expected.items():
        assert same_bits(torch.cat([part[name] for part in parts]), each), name
    assert len(set(expected["keys"].tolist())) == 6


def test_threads_get_the_same_bits() -> None:
    images, before = photos(6), torch.get_num_threads()
    expected = numbers(images)
    try:
        torch.set_num_threads(3)
        with ThreadPoolExecutor(3) as threads:
            for found in threads.map(numbers, [images] * 6):
                assert all(map(same_bits, found.values(), expected.values()))
    finally:
        torch.set_num_threads(before)


# ---------------------------------------------------------------------- keys


@given(st.integers(0, 2**70))
def test_keys_follow_the_pixels_and_the_seed(seed: int) -> None:
    images = toy_images(2)
    moved = images.clone()
    moved[0, 1, 3, 3] += 1e-6
    for given_seed in (seed, SECRET + bytes(seed % 9)):
        keys, other = noise.stream_keys(images, given_seed), noise.stream_keys(moved, given_seed)
        assert keys[0] != other[0]
        assert keys[1] == other[1]
    assert not torch.equal(noise.stream_keys(images, seed), noise.stream_keys(images, seed + 1))
    assert not torch.equal(noise.stream_keys(images, b"a" * 16), noise.stream_keys(images, b"b" * 16))
    assert torch.equal(noise.stream_keys(images * 0.0, seed), noise.stream_keys(-images * 0.0, seed)), "-0.0 is 0.0"


def test_a_secret_key_is_the_hmac_of_the_pixels() -> None:
    images = toy_images(1)
    digest = hmac.digest(SECRET, images.numpy().tobytes(), "sha256")
    assert noise.stream_keys(images, SECRET).item() == int.from_bytes(digest[:8], "little", signed=True)
    assert noise.stream_keys(images, b"long" * 40).shape == (1,)
    assert torch.equal(noise.stream_keys(images, np.int64(3)), noise.stream_keys(images, 3))  # type: ignore[arg-type]


def test_pixels_of_8_bits_are_hashed_as_bytes() -> None:
    levels = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
    digest = hmac.digest(SECRET, b"8 bit" + bytes(range(256)), "sha256")
    [key] = noise.stream_keys(levels, SECRET)
    assert key.item() == int.from_bytes(digest[:8], "little", signed=True)
    pixels = levels.float() / 255.0
    assert noise.stream_keys(pixels, SECRET) == key
    assert noise.stream_keys(torch.where(pixels == 0, -0.0, pixels), SECRET) == key
    just_above = pixels.flatten()[1].nextafter(torch.tensor(1.0))
    for index, value in ((1, just_above), (0, -1 / 255), (255, 511 / 255), (7, torch.nan)):
        changed = pixels.clone()
        changed.flatten()[index] = value
        assert noise.stream_keys(changed, SECRET) != key
