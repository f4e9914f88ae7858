"""The result of a defence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from react_clip.errors import ReactClipError
from react_clip.functional import Similarity
from react_clip.optional import require

if TYPE_CHECKING:
    import pandas as pd

MEASUREMENTS = ("drift", "instability", "score", "sigma")
"""Diagnostics that :class:`Defended` has of every defence; NaN where a defence does not measure them."""


@dataclass(frozen=True, eq=False, repr=False)
class Defended:
    """Defended answers and diagnostics, one row per image.

    A diagnostic is also an attribute: ``out.drift`` is ``out.diagnostics["drift"]``.
    """

    features: Tensor
    """Unit features ``[B, D]``; they serve retrieval too."""
    scores: Tensor | None
    """:attr:`logits`, or ``None`` without classes."""
    gated: Tensor
    """Mask ``[B]``: true exactly where the feature of the answer is not the image's own."""
    passes: Tensor
    """Encoder forward passes of each image ``[B]``; a view of another size counts as its fraction of the tokens."""
    backward_passes: Tensor
    """Backward passes of each image ``[B]``; 0 for all defences without optimisation."""
    diagnostics: dict[str, Tensor]
    """Why an image was corrected or not: tensors ``[B]``, NaN where a value was not measured. ``gate_open`` is the
    decision of defences that have a gate."""
    class_names: Sequence[tuple[str, ...]] = ()
    """Names of the classes of each image."""
    similarity: Similarity = field(default=Similarity())
    """From logits to probabilities."""

    @property
    def logits(self) -> Tensor:
        """Logits ``[B, K]``; -inf for classes that an image does not have. Raises without classes."""
        if self.scores is None:
            raise ReactClipError("these features were computed without classes, so there are no answers")
        return self.scores

    @property
    def labels(self) -> Tensor:
        """The answer of each image as the index of a class ``[B]``; :attr:`names` has the words."""
        return self.logits.argmax(-1)

    @property
    def names(self) -> list[str]:
        """The answer of each image as a word."""
        return [names[label] for names, label in zip(self.class_names, self.labels.tolist(), strict=True)]

    @property
    def probs(self) -> Tensor:
        """Class probabilities ``[B, K]``; those of a model with a sigmoid (SigLIP) do not add up to 1."""
        return self.similarity.probabilities(self.logits)

    def __getattr__(self, name: str) -> Tensor:
        diagnostics = self.__dict__.get("diagnostics", {})
        if name in diagnostics:
            value: Tensor = diagnostics[name]
            return value
        if name in MEASUREMENTS and "passes" in self.__dict__:
            return torch.full_like(self.passes, torch.nan)
        raise AttributeError(f"{name!r} is no field or diagnostic; there are {', '.join(diagnostics)}")

    def __len__(self) -> int:
        return len(self.features)

    def __repr__(self) -> str:
        """Number of images, the first answers and how many were changed."""
        names = [] if self.scores is None else self.names[:4]
        shown = ", ".join(names) + (", ..." if len(self) > len(names) > 0 else "")
        return f"{type(self).__name__}({len(self)} images: {shown}; {int(self.gated.sum())} corrected)"

    def to_dict(self) -> list[dict[str, Any]]:
        """JSON values of each image: answer, probability, ``gated``, passes, diagnostics (``None`` for NaN)."""
        columns: dict[str, list[Any]] = {}
        if self.scores is not None:
            columns = {"name": self.names, "probability": self.probs.max(-1).values.tolist()}
        measured = {"gated": self.gated, "passes": self.passes, **self.diagnostics}
        columns |= {name: [None if x != x else x for x in value.tolist()] for name, value in measured.items()}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def to_pandas(self) -> pd.DataFrame:
        """:meth:`to_dict` as a table with one row per image; needs pandas (extra ``eval``)."""
        table: pd.DataFrame = require("pandas", "to_pandas", extra="eval").DataFrame(self.to_dict())
        return table
