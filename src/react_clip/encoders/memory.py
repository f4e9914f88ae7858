"""Features of views that were encoded before: defences that differ in one constant look at the same noisy views.

The noise of a view follows from the image and the seed, so in a sweep over alpha all defences but the first ask for
what is already known. A batch is recognised as a whole by the content of every view in it: what comes back is what the
encoder gave for exactly this batch, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from react_clip import noise


class ViewMemory:
    """Unit features by the content of their batch, the oldest forgotten first.

    >>> import torch
    >>> memory, views = ViewMemory(), torch.rand(2, 3, 4, 4)
    >>> first = memory.recall(views, lambda: torch.ones(2, 5))
    >>> torch.equal(memory.recall(views.clone(), lambda: torch.zeros(2, 5)), first)
    True
    >>> memory.hits
    1
    """

    def __init__(self, limit_bytes: int = 512 * 2**20) -> None:
        self.limit_bytes = limit_bytes
        self.hits = 0
        self._known: dict[tuple[int, ...], Tensor] = {}
        self._bytes = 0

    def recall(self, views: Tensor, encode: Callable[[], Tensor]) -> Tensor:
        """Features of a batch of views: remembered, or encoded now."""
        key = tuple(noise.stream_keys(views, 0).tolist())
        if key in self._known:
            self.hits += 1
            return self._known[key]
        features = encode()
        size = features.numel() * features.element_size()
        while self._known and self._bytes + size > self.limit_bytes:
            forgotten = self._known.pop(next(iter(self._known)))
            self._bytes -= forgotten.numel() * forgotten.element_size()
        if size <= self.limit_bytes:
            self._known[key] = features
            self._bytes += size
        return features

    def forget(self) -> None:
        """Start anew."""
        self._known.clear()
        self._bytes = 0
