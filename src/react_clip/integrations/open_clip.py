"""An open_clip model whose image features are defended; called as open_clip's own ``CLIP``."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from react_clip.defenses import Defense
from react_clip.encoders import Encoder
from react_clip.encoders.openclip import wrap_model
from react_clip.errors import ReactClipError
from react_clip.integrations.common import DefendedFeatures
from react_clip.preprocess import from_levels
from react_clip.secret import Seed


class DefendedOpenCLIP(nn.Module):
    """``encode_image``, ``encode_text``, ``logit_scale`` and ``forward`` of open_clip, with the defence inside.

    Takes the tensors that open_clip's ``preprocess`` makes. The model is frozen and set to evaluation in place.

    Args:
        model: what ``open_clip.create_model_and_transforms`` returns.
        guard: a defence, such as ``rc.SecondLook.for_encoder("open_clip:ViT-B-16/openai")``: the model itself does not
            say which weights it holds. Without labels it compares features alone.
        labels: classes over which the guard compares predictions; they need the model's ``tokenizer``.
        tokenizer: ``open_clip.get_tokenizer(...)``.
        seed: of the noise, where others shall be able to repeat it.
        secret: key of the noise, instead of a seed; by default that of the process.
    """

    def __init__(
        self,
        model: nn.Module,
        guard: Defense,
        *,
        labels: Sequence[str] | None = None,
        tokenizer: Any = None,
        seed: Seed | None = None,
        secret: bytes | None = None,
    ) -> None:
        super().__init__()
        if labels is not None and tokenizer is None:
            raise ReactClipError("labels need the model's tokenizer; give tokenizer=open_clip.get_tokenizer(...)")
        self._model: Any = model
        self.encoder = _wrap(model, tokenizer)
        self._defended = DefendedFeatures(self.encoder, guard, labels=labels, seed=seed, secret=secret)
        self.guard = self._defended.guard

    @property
    def logit_scale(self) -> Tensor:
        """Logarithm of the model's inverse temperature."""
        return self._model.logit_scale  # type: ignore[no-any-return]

    def encode_image(self, image: Tensor, normalize: bool = False) -> Tensor:
        """Defended features of what open_clip's ``preprocess`` returns.

        Without ``normalize`` they have the length of the plain features, which costs one more encoder pass.
        """
        pixels = to_unit_range(image.to(self.encoder.device), self.encoder.mean, self.encoder.std)
        features = self._defended.of_pixels(pixels)
        if not normalize:
            features = features * self.encoder.raw(pixels).norm(dim=-1, keepdim=True)
        return features.to(self.encoder.dtype)

    def encode_text(self, text: Tensor, normalize: bool = False) -> Tensor:
        """Features of tokens; texts are not defended."""
        features: Tensor = self._model.encode_text(text, normalize=normalize)
        return features

    def forward(self, image: Tensor | None = None, text: Tensor | None = None) -> Any:
        """Unit features of images and texts and the scale, as the model returns them: a tuple, or a dictionary."""
        outputs = {
            "image_features": None if image is None else self.encode_image(image, normalize=True),
            "text_features": None if text is None else self.encode_text(text, normalize=True),
            "logit_scale": self.logit_scale.exp(),
        }
        if (bias := getattr(self._model, "logit_bias", None)) is not None:
            outputs["logit_bias"] = bias
        return outputs if getattr(self._model, "output_dict", False) else tuple(outputs.values())


def to_unit_range(normalised: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Undo ``(x - mean) / std``; multiples of 1/255 are restored exactly.

    Rounding would otherwise leave pixels such as -3e-8, and change the noise, which follows the pixels bit for bit.
    """
    if not normalised.is_floating_point():
        raise ReactClipError(f"images have dtype {normalised.dtype}; give what open_clip's preprocess returns (floats)")
    error = 4 * max(torch.finfo(normalised.dtype).eps, torch.finfo(torch.float32).eps)
    pixels = normalised.float() * std + mean
    nearest = from_levels((pixels.detach() * 255.0).round().clamp(0, 255))
    # Straight through: the gradient is that of the un-normalisation.
    pixels = torch.where((pixels - nearest).abs() <= error, pixels + (nearest - pixels).detach(), pixels)
    low, high = pixels.aminmax()
    if not bool((low >= 0) & (high <= 1)):
        raise ReactClipError(
            f"images span [{low.item():.4g}, {high.item():.4g}] once CLIP's normalisation is undone, not [0, 1]; give "
            "what open_clip's preprocess returns, unchanged"
        )
    if bool((normalised.min() >= 0) & (normalised.max() <= 1)):
        warnings.warn(
            "all values lie in [0, 1]; DefendedOpenCLIP takes images that CLIP's normalisation made", stacklevel=3
        )
    return pixels


def _wrap(model: nn.Module, tokenizer: Any) -> Encoder:
    """An encoder around a model that open_clip has made."""
    if not all(callable(getattr(model, part, None)) for part in ("encode_image", "encode_text")):
        raise ReactClipError(f"{type(model).__name__} is no open_clip model: it lacks encode_image or encode_text")
    if len(dtypes := {str(parameter.dtype) for parameter in model.parameters()}) > 1:
        raise ReactClipError(
            f"the model mixes {', '.join(sorted(dtypes))}; create it with precision='fp32', 'pure_bf16' or 'pure_fp16'"
        )
    parts: Any = model.eval().requires_grad_(False)
    size, like = parts.visual.image_size, next(model.parameters())
    size = size if isinstance(size, tuple | list) else (size, size)
    # Towers store their width in different places; one pass works for all of them.
    dim = parts.encode_image(torch.zeros(1, 3, *size, device=like.device, dtype=like.dtype)).shape[1]
    return wrap_model(model, name=f"open_clip:{type(model).__name__}", dim=dim, tokenizer=tokenizer).to(like.device)
