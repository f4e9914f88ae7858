"""The photos of a finetuning run, decoded once into memory or read ahead of the steps."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor
from tqdm import tqdm

from react_clip.data.dataset import ImageDataset
from react_clip.errors import ReactClipError
from react_clip.preprocess import Preprocessing, check_range, to_8bit
from react_clip.storage import tensor_digest

AHEAD = 3
"""Batches that are read while a step computes."""


class Photos:
    """Square photos ``[3, side, side]`` of uint8 by index, from a tensor or from files.

    The next photo stands in for one that cannot be read, which ``unreadable`` names: so a step sees the same photos
    whether they are all in memory or read when they are needed.
    """

    def __init__(self, source: Tensor | ImageDataset, how: Preprocessing) -> None:
        self.unreadable: dict[str, str] = {}
        """Why each photo that was met and could not be read was left out, by its id."""
        self._source = _as_uint8(source, how.size) if isinstance(source, Tensor) else source
        self._stack = self._source if isinstance(self._source, Tensor) else None
        # Crops are cut from squares as large as the paper resizes to; their centre is what an encoder sees.
        side = Preprocessing.paper(how.size).resize
        self._how = replace(how, size=side, resize=side, mode="shorter")
        self._pool = ThreadPoolExecutor(min(16, os.cpu_count() or 1))

    def __len__(self) -> int:
        return len(self._source)

    def digest(self) -> str:
        """SHA-256 of all photos."""
        return tensor_digest(self._source) if isinstance(self._source, Tensor) else self._source.fingerprint()

    def load(self, device: torch.device, *, progress: bool = False) -> None:
        """Decode all photos into the device's memory, if they take at most half of what is free there."""
        side = self._how.size if self._stack is None else self._stack.shape[-1]
        if len(self) * 3 * side**2 > free_memory(device) // 2:
            return
        if self._stack is None:
            self._stack = torch.empty(len(self), 3, side, side, dtype=torch.uint8, device=device)
            found = enumerate(self._pool.map(self._read, range(len(self))))
            for index, pixels in tqdm(found, "reading photos", len(self), unit="photo", disable=not progress):
                self._stack[index] = pixels
        self._stack = self._stack.to(device)

    def take(self, indices: Tensor) -> Tensor:
        """The photos ``[N, 3, side, side]`` with these indices."""
        if self._stack is not None:
            return self._stack[indices.to(self._stack.device)]
        return torch.stack(list(self._pool.map(self._read, indices.tolist())))

    def batches(self, chosen: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Indices and photos of each batch, read ahead."""
        reading: deque[tuple[Tensor, Future[Tensor]]] = deque()
        with ThreadPoolExecutor(1) as reader:
            for indices in chosen:
                reading.append((indices, reader.submit(self.take, indices)))
                if len(reading) > AHEAD:
                    first, photos = reading.popleft()
                    yield first, photos.result()
            for indices, photos in reading:
                yield indices, photos.result()

    def _read(self, index: int) -> Tensor:
        assert isinstance(self._source, ImageDataset)
        for place in range(index, index + len(self)):
            photo = self._source.photos[place % len(self)]
            if photo.id not in self.unreadable:
                try:
                    return to_8bit(photo.open(), self._how)
                except ReactClipError as error:
                    self.unreadable[photo.id] = str(error)
        name, reason = next(iter(self.unreadable.items()))
        raise ReactClipError(f"none of the {len(self)} photos can be read, such as {name} ({reason}); give others")


def _as_uint8(pixels: Tensor, least: int) -> Tensor:
    if pixels.ndim != 4 or pixels.shape[1] != 3 or not least <= pixels.shape[2] == pixels.shape[3] or not len(pixels):
        takes = f"give [N, 3, {least}, {least}] with N >= 1, or larger squares"
        raise ReactClipError(f"photos have shape {list(pixels.shape)}; {takes}")
    if pixels.dtype == torch.uint8:
        return pixels.detach()
    check_range(pixels)
    return pixels.detach().mul(255).round().to(torch.uint8)


def free_memory(device: torch.device) -> int:
    """Free bytes of a GPU, or of this machine."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
