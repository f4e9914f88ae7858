"""The text tower of a CLIP model: prompts, or embedded prompts for prompt tuning, to unit features."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from react_clip import functional
from react_clip.errors import ReactClipError

PROMPTS = 256
"""Most prompts in one call of a tower: bounds the memory."""


class TextTower(nn.Module, ABC):
    """The text tower ``model`` and its tokenizer."""

    def __init__(self, model: nn.Module, tokenizer: Any, name: str) -> None:
        super().__init__()
        self.model: Any = model
        self.tokenizer = tokenizer
        self.name = name

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next(self.parameters()).device

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Tensor:
        """Unit features of prompts, ``[N, dim]``."""
        parts = [list(prompts[start : start + PROMPTS]) for start in range(0, len(prompts), PROMPTS)]
        return functional.normalize(at_least_fp32(torch.cat([self._features(part) for part in parts])))

    def embed(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Token embeddings ``[N, T, width]`` of prompts and the position of each end token ``[N]``.

        :meth:`encode_embedded` reads them; prompt tuning replaces some of the embeddings in between. Position 0 holds
        the start token, and T ends with the longest prompt. Raises unless the tower is CLIP's.
        """
        raise self._no_embeddings()

    def encode_embedded(self, embeddings: Tensor, ends: Tensor) -> Tensor:
        """Unit features ``[N, dim]`` of embedded prompts; gradients flow to the embeddings, which may be of any dtype.

        Equals :meth:`encode` when the embeddings are those of :meth:`embed`.
        """
        dtype = next(self.parameters()).dtype
        return functional.normalize(at_least_fp32(self._embedded_features(embeddings.to(dtype), ends)))

    @abstractmethod
    def _features(self, prompts: list[str]) -> Tensor:
        """Projected features of prompts."""

    def _embedded_features(self, embeddings: Tensor, ends: Tensor) -> Tensor:
        """Projected features of embeddings without positions; raises unless the tower is CLIP's."""
        raise self._no_embeddings()

    def _no_embeddings(self) -> ReactClipError:
        return ReactClipError(
            f"the text tower of {self.name!r} takes no token embeddings (it is not CLIP's causal transformer); use a "
            "complete CLIP such as openai/clip-vit-base-patch32"
        )


def at_least_fp32(features: Tensor) -> Tensor:
    """Features in fp32, or in fp64 where they are."""
    return features if features.dtype == torch.float64 else features.float()
