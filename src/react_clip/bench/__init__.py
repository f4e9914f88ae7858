"""The cost of a defence, measured side by side in one run: same weights, same images, same precision."""

from react_clip.bench.timing import Comparison, Timing, measure
from react_clip.bench.workload import BARE, OURS, PLAIN, PUBLISHED, Bench, Traffic

__all__ = ["BARE", "OURS", "PLAIN", "PUBLISHED", "Bench", "Comparison", "Timing", "Traffic", "measure"]
