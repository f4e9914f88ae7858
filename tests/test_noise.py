"""Random streams: standard normal, independent, repeatable, and the same in every batch."""

from __future__ import annotations

import hmac
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from react_clip import ReactClipError, noise
from toys import toy_images

SECRET = b"a secret that is long enough"


def test_numbers_are_standard_normal_and_streams_are_unrelated() -> None:
    keys = noise.fork(noise.stream_keys(toy_images(4), 0), 3)
    draws = noise.normal(keys, (400_000,)).double()
    # Four standard errors of mean, variance, skewness and kurtosis at n = 1.6 million.
    n = draws.numel()
    assert abs(draws.mean()) < 4 / n**0.5
    assert abs((draws**2).mean() - 1) < 4 * (2 / n) ** 0.5
    assert abs((draws**3).mean()) < 4 * (15 / n) ** 0.5
    assert abs((draws**4).mean() - 3) < 4 * (96 / n) ** 0.5
    correlation = torch.corrcoef(draws) - torch.eye(4)
    assert correlation.abs().max() < 4.5 / 400_000**0.5
    half = draws[0]
    for lag in (1, 2, 3, 200_000):
        assert abs((half[lag:] * half[:-lag]).mean()) < 4.5 / (len(half) - lag) ** 0.5


def test_the_generator_is_splitmix64() -> None:
    # First outputs of the published algorithm for seed 1234567.
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    bits = noise._bits(torch.tensor([1234567]), 5)[0].tolist()
    assert [value % 2**64 for value in bits] == expected


@given(st.integers(0, 2**70), st.permutations(range(6)), st.integers(1, 5))
def test_an_image_keeps_its_key_in_any_batch_and_order(seed: int, order: list[int], split: int) -> None:
    images = toy_images(6)
    keys = noise.stream_keys(images, seed)
    assert torch.equal(noise.stream_keys(images[order], seed), keys[order])
    assert torch.equal(torch.cat([noise.stream_keys(part, seed) for part in images.split(split)]), keys)
    assert len(set(keys.tolist())) == 6


def test_keys_follow_the_pixels_the_seed_and_the_secret() -> None:
    images = toy_images(2)
    moved = images.clone()
    moved[0, 1, 3, 3] += 1e-6
    for seed in (0, SECRET):
        keys, other = noise.stream_keys(images, seed), noise.stream_keys(moved, seed)
        assert keys[0] != other[0]
        assert keys[1] == other[1]
    assert not torch.equal(noise.stream_keys(images, 0), noise.stream_keys(images, 1))
    assert not torch.equal(noise.stream_keys(images, b"a" * 16), noise.stream_keys(images, b"b" * 16))
    assert torch.equal(noise.stream_keys(images * 0.0, 0), noise.stream_keys(-images * 0.0, 0)), "-0.0 equals 0.0"


def test_a_secret_key_is_the_hmac_of_the_pixels() -> None:
    images = toy_images(1)
    digest = hmac.digest(SECRET, images.numpy().tobytes(), "sha256")
    assert noise.stream_keys(images, SECRET).item() == int.from_bytes(digest[:8], "little", signed=True)
    assert noise.stream_keys(images, b"long" * 40).shape == (1,)
    for seed, says in ((b"", "has 0 bytes"), (b"short", "has 5 bytes"), ("12345", "type str"), (1.5, "type float")):
        with pytest.raises(ReactClipError, match=says) as caught:
            noise.stream_keys(images, seed)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
    assert torch.equal(noise.stream_keys(images, np.int64(3)), noise.stream_keys(images, 3))  # type: ignore[arg-type]


def test_pixels_of_8_bits_are_hashed_as_bytes() -> None:
    levels = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
    digest = hmac.digest(SECRET, b"8 bit" + bytes(range(256)), "sha256")
    [key] = noise.stream_keys(levels, SECRET)
    assert key.item() == int.from_bytes(digest[:8], "little", signed=True)
    pixels = levels.float() / 255.0
    assert noise.stream_keys(pixels, SECRET) == key
    assert noise.stream_keys(torch.where(pixels == 0, -0.0, pixels), SECRET) == key
    for index, value in (
        (1, pixels.flatten()[1].nextafter(torch.tensor(1.0))),
        (0, -1 / 255),
        (255, 511 / 255),
        (7, torch.nan),
    ):
        changed = pixels.clone()
        changed.flatten()[index] = value
        assert noise.stream_keys(changed, SECRET) != key


def reference_normal(key: int, count: int) -> list[float]:
    """The stream in plain Python: SplitMix64 as a counter, then Box-Muller, cosines first."""
    cosines, sines = [], []
    for position in range(1, (count + 1) // 2 + 1):
        bits = (key + position * 0x9E3779B97F4A7C15) % 2**64
        bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB % 2**64
        bits ^= bits >> 31
        radius = math.sqrt(-2.0 * math.log(((bits >> 40) + 1) / 2**24))
        angle = 2.0 * math.pi * (bits >> 8 & 0xFFFFFF) / 2**24
        cosines.append(radius * math.cos(angle))
        sines.append(radius * math.sin(angle))
    return (cosines + sines)[:count]


@given(st.integers(-(2**63), 2**63 - 1), st.integers(1, 9))
def test_normal_numbers_are_box_muller_pairs_of_the_stream(key: int, count: int) -> None:
    keys = torch.tensor([key])
    drawn = noise.normal(keys, (count,))[0]
    assert torch.allclose(drawn, torch.tensor(reference_normal(key, count)), rtol=1e-5, atol=1e-5)
    assert keys.item() == key, "drawing must not change the key"
