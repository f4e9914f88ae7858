"""The processes of ``torchrun`` that share the photos of every step; without it there is one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from react_clip.errors import ReactClipError


class Group(NamedTuple):
    """This process among those that train together."""

    rank: int
    size: int

    def rows(self, batch: int) -> slice:
        """The photos of a batch that this process computes; whole fours, so that all have the same clean fraction.

        >>> Group(1, 2).rows(8), Group(0, 1).rows(6)
        (slice(4, 8, None), slice(0, 6, None))
        """
        if self.size > 1 and batch % (4 * self.size):
            least = 4 * self.size
            raise ReactClipError(
                f"batch is {batch}; {self.size} processes share a multiple of {least}, such as {least}"
            )
        each = batch // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their means over all processes."""
        if self.size > 1:
            for tensor in tensors:
                dist.all_reduce(tensor)
            torch._foreach_div_(list(tensors), self.size)

    def wait(self) -> None:
        """Until all processes are here."""
        if self.size > 1:
            dist.barrier()


def group() -> Group:
    """The group that was joined, or this process alone."""
    joined = dist.is_available() and dist.is_initialized()
    return Group(dist.get_rank(), dist.get_world_size()) if joined else Group(0, 1)


@contextmanager
def joined(device: str | None) -> Iterator[str | None]:
    """Be one of the processes of ``torchrun`` if it started this one; gives the device of this process."""
    if "LOCAL_RANK" not in os.environ:
        yield device
        return
    if device is None and torch.cuda.is_available():
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device in (None, "cpu") else "nccl")
    try:
        yield device
    finally:
        dist.destroy_process_group()
