"""Universal perturbation (Moosavi-Dezfooli et al., 2017): one and the same change for every photo."""

from __future__ import annotations

import itertools
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from react_clip import linf, noise
from react_clip.attacks.base import Attack
from react_clip.attacks.problem import Problem, encoder_of
from react_clip.config import Count, PositiveLength
from react_clip.encoders import Encoder
from react_clip.encoders.checkpoints import read_tensors
from react_clip.errors import ReactClipError
from react_clip.storage import photo_files, tensor_digest


class Universal(Attack):
    r"""Add one perturbation, from a file or fitted on photos; no gradients or answers of the attacked photo are needed.

    .. math:: \delta \leftarrow \mathrm{clip}_\epsilon\big(\delta - s\,\mathrm{sign}\,\nabla_\delta
              \textstyle\sum_b \cos(f(x_b + \delta), f(x_b))\big)

    over the photos of a folder, batch by batch, as X-Transfer (2025) does with one tower. A file holds ``delta``
    ``[3, S, S]``, ``.safetensors`` or a tensor of torch: those of XTransferBench, ``model.safetensors`` of the
    repositories ``hanxunh/xtransfer_..._linf_...``, are read as they are. The perturbation is scaled so that its
    largest pixel is eps, and resized to the photo's side.

    >>> Universal(file="delta.safetensors").name, Universal(photos="photos/pets/train", steps=200).name
    ('universal-delta', 'universal-200')
    """

    kind: ClassVar[str] = "universal"
    file: str | None = None
    """A perturbation that was made before; or give ``photos``."""
    photos: str | None = None
    """Folder of photos to fit on, none of them photos that are attacked later."""
    steps: Count = 400
    """Gradient steps of the fit."""
    step_size: PositiveLength = 0.5 / 255
    """Change of a pixel value per step of the fit."""
    batch: Count = 32
    """Photos per step; the photos are taken in turn."""

    def __post_init__(self) -> None:
        if (self.file is None) == (self.photos is None):
            raise ReactClipError("universal needs a file or photos, not both: file: delta.safetensors, or photos: DIR")

    def __repr__(self) -> str:
        """The configuration with the digest of the file's perturbation: another one is another attack."""
        return super().__repr__() + (f" {tensor_digest(read_perturbation(Path(self.file)))}" if self.file else "")

    @property
    def name(self) -> str:
        """``universal-400``, or the file's name without its suffix."""
        return f"{self.kind}-{self.steps if self.file is None else Path(self.file).stem}"

    def search(self, problem: Problem) -> Tensor:
        """The images with the perturbation."""
        encoder = encoder_of(problem.target)
        if self.file is None and encoder is None:
            raise ReactClipError("universal fits on the features of a classifier; give one, or a file")
        delta = _fitted(self, encoder) if self.file is None else read_perturbation(Path(self.file))
        problem.tick()
        if delta.shape[1:] != problem.x.shape[2:]:
            delta = F.interpolate(delta[None], problem.x.shape[2:], mode="bilinear")[0]
        return problem.ball.project(problem.x + problem.ball.eps * (delta / delta.abs().max()).to(problem.x))

    def fit(self, encoder: Encoder) -> Tensor:
        """The perturbation ``[3, S, S]`` that lowers the cosines of the photos, at most ``eps`` in every pixel.

        Save it with ``safetensors.torch.save_file({"delta": delta}, path)``, and give ``file=path`` from then on.
        """
        files, side = photo_files(Path(self.photos or "")), encoder.image_size
        order = itertools.cycle(noise.uniform(torch.tensor([0]), len(files))[0].argsort().tolist())

        def gradient_at(grey: Tensor) -> Tensor:
            x = encoder.prepare([files[at] for at in itertools.islice(order, min(self.batch, len(files)))])
            with torch.enable_grad():
                moving = grey.detach().requires_grad_()
                cosines = F.cosine_similarity(encoder((x + moving - 0.5).clamp(0.0, 1.0)), encoder(x))
                return torch.autograd.grad(-cosines.sum(), moving)[0]

        # Added to a grey image, a perturbation is one of its ball.
        ball = linf.Ball(torch.full((1, 3, side, side), 0.5, device=encoder.device), self.eps)
        start = ball.random_start(torch.tensor([1], device=encoder.device))
        return linf.ascend(gradient_at, start, ball, steps=self.steps, step_size=self.step_size)[0] - 0.5


@lru_cache(maxsize=8)
def _fitted(attack: Universal, encoder: Encoder) -> Tensor:
    """The perturbation of an attack, fitted once for each encoder."""
    return attack.fit(encoder)


def read_perturbation(path: Path) -> Tensor:
    """The perturbation ``[3, S, S]`` of a file: its ``delta``, its only tensor, or XTransferBench's L2 parameter."""
    tensors = read_tensors(path)
    if "delta_param" in tensors:
        tensors["delta"] = tensors["delta_param"].tanh()
    delta = tensors.get("delta", torch.zeros(0) if len(tensors) != 1 else next(iter(tensors.values()))).detach().float()
    if delta.squeeze(0).ndim != 3 or delta.shape[-3] != 3 or not bool(delta.isfinite().all()) or not bool(delta.any()):
        found = ", ".join(f"{name} {tuple(each.shape)}" for name, each in tensors.items()) or "nothing"
        raise ReactClipError(f"{path} holds {found:.200}; it must be one finite 'delta' [3, S, S] that is not zero")
    return delta.reshape(delta.shape[-3:])
