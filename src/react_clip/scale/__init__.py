"""The same defence, evaluation and service on a Ray cluster."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from react_clip.scale.embedding import Summary, defend_dataset

__all__ = ["Summary", "defend_dataset"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import a public name on first use, so that a Ray worker without a model starts without torch."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from react_clip.scale import embedding

        return getattr(embedding, name)
