"""Defended CLIP for libraries in use: transformers pipelines, open_clip, Chroma, LangChain.

Each module imports its library, so each is imported on first use of one of its names.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from react_clip.integrations.common import drift_only as drift_only

if TYPE_CHECKING:
    from react_clip.integrations.chroma import ChromaEmbeddings as ChromaEmbeddings
    from react_clip.integrations.langchain import LangChainEmbeddings as LangChainEmbeddings
    from react_clip.integrations.open_clip import DefendedOpenCLIP as DefendedOpenCLIP
    from react_clip.integrations.transformers_pipeline import (
        DefendedZeroShotImageClassificationPipeline as DefendedZeroShotImageClassificationPipeline,
    )
    from react_clip.integrations.transformers_pipeline import register_pipeline as register_pipeline
    from react_clip.integrations.transformers_pipeline import zero_shot_pipeline as zero_shot_pipeline

_OWNERS = {
    "ChromaEmbeddings": "chroma",
    "DefendedOpenCLIP": "open_clip",
    "DefendedZeroShotImageClassificationPipeline": "transformers_pipeline",
    "LangChainEmbeddings": "langchain",
    "register_pipeline": "transformers_pipeline",
    "zero_shot_pipeline": "transformers_pipeline",
}
"""Module of each public name that is imported on first use."""

if not TYPE_CHECKING:  # type checkers read the imports above instead, and find misspelt names

    def __getattr__(name: str) -> Any:
        """Import a public name on first use."""
        if name not in _OWNERS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_OWNERS[name]}"), name)

    def __dir__() -> list[str]:
        """Public names, imported or not."""
        return sorted({*_OWNERS, "drift_only"})
