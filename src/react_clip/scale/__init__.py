"""From one machine to many: the same defence, evaluation and service on a Ray cluster."""

from react_clip.scale.embedding import Summary, defend_dataset

__all__ = ["Summary", "defend_dataset"]
