"""Drop-ins that defend CLIP where people already use it: transformers pipelines, open_clip, Chroma, LangChain.

Nothing of these libraries is imported before the drop-in that needs it is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from react_clip.integrations.common import drift_only

if TYPE_CHECKING:
    from react_clip.integrations.embeddings import ChromaEmbeddings, LangChainEmbeddings
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

_HOMES = {
    **dict.fromkeys(("ChromaEmbeddings", "LangChainEmbeddings"), "embeddings"),
    "DefendedOpenCLIP": "open_clip",
    **dict.fromkeys(
        ("DefendedZeroShotImageClassificationPipeline", "register_pipeline", "zero_shot_pipeline"),
        "transformers_pipeline",
    ),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
