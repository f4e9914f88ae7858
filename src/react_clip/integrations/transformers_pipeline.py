"""A defended zero-shot image classification pipeline for transformers.

Pixels are those of the model's own image processor, less its normalisation, which the encoder does: with the guard
closed the scores are the stock pipeline's up to rounding.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import (
    AutoImageProcessor,
    CLIPConfig,
    CLIPImageProcessor,
    PreTrainedModel,
    ZeroShotImageClassificationPipeline,
)

from react_clip.defenses import Defense, default_for
from react_clip.encoders import Encoder
from react_clip.encoders.loading import load_quietly
from react_clip.integrations.common import as_encoder, local_image, noted_seed
from react_clip.preprocess import read_image
from react_clip.secret import Seed
from react_clip.zeroshot import ZeroShotClassifier, check_names

_TEMPLATE = "This is a photo of {}."


class EncoderModel(PreTrainedModel):  # type: ignore[misc]
    """An encoder in the form of a model of transformers, as pipelines want it."""

    config_class = CLIPConfig

    def __init__(self, encoder: Encoder) -> None:
        super().__init__(CLIPConfig())
        self.encoder = encoder


def zero_shot_pipeline(
    model: Encoder | str | Path,
    guard: Defense | None = None,
    seed: Seed | None = None,
    *,
    secret: bytes | None = None,
    **kwargs: Any,
) -> DefendedZeroShotImageClassificationPipeline:
    """A defended pipeline: ``pipe(images, candidate_labels=[...], hypothesis_template="...")``.

    Args:
        model: a hub id, a folder, the offline ``"clip-vit-b-16"`` or a loaded encoder.
        guard: any defence; by default the one for the model (:func:`react_clip.defenses.default_for`).
        seed: of the noise, where others shall be able to repeat it.
        secret: key of the noise, instead of a seed; by default that of the process.
        kwargs: what every pipeline takes, such as ``batch_size``.
    """
    encoder = as_encoder(model)
    return DefendedZeroShotImageClassificationPipeline(
        model=EncoderModel(encoder),
        image_processor=_image_processor(encoder),
        device=encoder.device,
        guard=guard or default_for(encoder),
        seed=noted_seed(seed, secret),
        **kwargs,
    )


class DefendedZeroShotImageClassificationPipeline(ZeroShotImageClassificationPipeline):  # type: ignore[misc]
    """Zero-shot image classification with a defended CLIP; same calls and answers as the stock pipeline.

    Made by :func:`zero_shot_pipeline`. Images are paths, PIL images, bytes or ``data:`` URIs; URLs are not fetched.
    """

    def __init__(self, *args: Any, guard: Defense, seed: Seed, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.encoder: Encoder = self.model.encoder
        self.guard, self.seed = guard, seed
        self._classifier = functools.lru_cache(maxsize=1)(self._new_classifier)

    def check_model_type(self, supported_models: Any) -> None:
        """Every encoder can be in a pipeline."""

    def _sanitize_parameters(
        self, candidate_labels: Any = None, hypothesis_template: str | None = None, **ignored: Any
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        # Only what was given: the call's arguments are laid over those of the constructor.
        labels = {} if candidate_labels is None else {"candidate_labels": candidate_labels}
        template = {} if hypothesis_template is None else {"hypothesis_template": hypothesis_template}
        return {}, labels | template, labels

    def preprocess(self, image: Any) -> dict[str, Tensor]:
        """Pixels in [0, 1]: the processor's, before its normalisation."""
        decoded = read_image(local_image(image))
        pixels = self.image_processor(images=[decoded], return_tensors="pt", do_normalize=False)["pixel_values"]
        return {"pixel_values": pixels}

    def _forward(
        self, model_inputs: dict[str, Tensor], candidate_labels: Any = (), hypothesis_template: str | None = None
    ) -> dict[str, Tensor]:
        classifier = self._classifier(check_names(candidate_labels, unique=False), hypothesis_template)
        return {"probs": self.guard(classifier, model_inputs["pixel_values"], seed=self.seed).probs}

    def postprocess(self, model_outputs: dict[str, Any], candidate_labels: Any = ()) -> list[dict[str, Any]]:
        """Labels with their scores, best first, as the stock pipeline writes them."""
        scores = model_outputs["probs"][0].tolist()
        answers = [{"score": score, "label": label} for score, label in zip(scores, candidate_labels, strict=True)]
        return sorted(answers, key=lambda answer: -answer["score"])

    def _new_classifier(self, names: tuple[str, ...], template: str | None) -> ZeroShotClassifier:
        """The classifier of these labels; the one of the previous call is cached."""
        template = template or (_TEMPLATE if self.encoder.has_text else None)
        return ZeroShotClassifier(self.encoder, names, templates=template and [template], unique=False)


def _image_processor(encoder: Encoder) -> Any:
    """The model's own processor; CLIP's for this size where the model brings none (bicubic, shorter side to size)."""
    name = encoder.name
    source, _, revision = (name, "", "") if Path(name).is_dir() else name.partition("+")[0].partition("@")
    try:
        # Loading the encoder has fetched this file already, if there is one.
        with load_quietly():
            return AutoImageProcessor.from_pretrained(source, revision=revision or None, local_files_only=True)
    except (OSError, ValueError):
        size = encoder.image_size
        return CLIPImageProcessor(size={"shortest_edge": size}, crop_size={"height": size, "width": size})
