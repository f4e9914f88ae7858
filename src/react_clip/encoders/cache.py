"""A cache of encoded views, for evaluations: defences that differ in one constant encode the same noisy views.

The noise of a view follows from the image and the seed, so in a sweep over alpha all defences but the first encode
views that were encoded before. A batch is looked up as a whole, by the content of every view in it, so the cache
returns what the encoder gave for exactly this batch, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from react_clip import noise
from react_clip.encoders.base import Encoder


class ViewCache:
    """Unit features by the content of their batch; the oldest are dropped first.

    >>> cache, views = ViewCache(), torch.rand(2, 3, 4, 4)
    >>> first = cache.get(views, lambda views: torch.ones(2, 5))
    >>> torch.equal(cache.get(views.clone(), lambda views: torch.zeros(2, 5)), first), cache.hits
    (True, 1)
    """

    def __init__(self, limit_bytes: int = 512 * 2**20) -> None:
        self.limit_bytes = limit_bytes
        self.hits = 0
        self._features: dict[tuple[int, ...], Tensor] = {}
        self._bytes = 0

    def get(self, views: Tensor, encode: Callable[[Tensor], Tensor]) -> Tensor:
        """Features of a batch of views, from the cache or from ``encode``."""
        key = tuple(noise.stream_keys(views, 0).tolist())
        if key in self._features:
            self.hits += 1
            return self._features[key]
        features = encode(views)
        while self._features and self._bytes + features.nbytes > self.limit_bytes:
            self._bytes -= self._features.pop(next(iter(self._features))).nbytes
        if features.nbytes <= self.limit_bytes:
            self._features[key] = features
            self._bytes += features.nbytes
        return features

    def clear(self) -> None:
        """Drop everything."""
        self._features.clear()
        self._bytes = 0


@contextmanager
def cached_views(encoder: Encoder, cache: ViewCache) -> Iterator[None]:
    """Within this block, ``encoder.encode_views`` looks in the cache first; gradients and fp64 are never cached."""
    encode = encoder.encode_views

    def lookup(pixels: Tensor) -> Tensor:
        if pixels.requires_grad or pixels.dtype == torch.float64:
            return encode(pixels)
        return cache.get(pixels, encode)

    encoder.encode_views = lookup  # type: ignore[method-assign]
    try:
        yield
    finally:
        encoder.encode_views = encode  # type: ignore[method-assign]
