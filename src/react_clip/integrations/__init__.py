"""Defended CLIP for libraries in use: transformers pipelines, open_clip, Chroma, LangChain.

Each module imports its library, so each is imported on first use of one of its names.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from react_clip.integrations.common import drift_only

if TYPE_CHECKING:
    from react_clip.integrations.chroma import ChromaEmbeddings
    from react_clip.integrations.langchain import LangChainEmbeddings
    from react_clip.integrations.open_clip import DefendedOpenCLIP
    from react_clip.integrations.transformers_pipeline import (
        DefendedZeroShotImageClassificationPipeline,
        register_pipeline,
        zero_shot_pipeline,
    )

__all__ = [
    "ChromaEmbeddings",
    "DefendedOpenCLIP",
    "DefendedZeroShotImageClassificationPipeline",
    "LangChainEmbeddings",
    "drift_only",
    "register_pipeline",
    "zero_shot_pipeline",
]

_MODULES = {
    "ChromaEmbeddings": "chroma",
    "LangChainEmbeddings": "langchain",
    "DefendedOpenCLIP": "open_clip",
    "DefendedZeroShotImageClassificationPipeline": "transformers_pipeline",
    "register_pipeline": "transformers_pipeline",
    "zero_shot_pipeline": "transformers_pipeline",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
