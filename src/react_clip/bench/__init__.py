"""The cost of defences, measured side by side in one run: same weights, same images, same precision."""

from react_clip.bench.contenders import BARE, FINETUNING, PUBLISHED, contenders, finetuning, published, traffic
from react_clip.bench.timing import Comparison, Timing, peak_memory, speedup

__all__ = [
    "BARE",
    "FINETUNING",
    "PUBLISHED",
    "Comparison",
    "Timing",
    "contenders",
    "finetuning",
    "peak_memory",
    "published",
    "speedup",
    "traffic",
]
