"""The cost of defences, measured side by side in one run: same weights, same images, same precision."""

from react_clip.bench.contenders import BARE, PUBLISHED, contenders, published, traffic
from react_clip.bench.timing import Comparison, Timing, peak_memory, speedup

__all__ = ["BARE", "PUBLISHED", "Comparison", "Timing", "contenders", "peak_memory", "published", "speedup", "traffic"]
