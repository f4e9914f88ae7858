"""What a defence costs, measured side by side in one run: same weights, same images, same precision."""

from react_clip.bench.contenders import BARE, OURS, PLAIN, PUBLISHED, contenders
from react_clip.bench.machine import Roofline, roofline
from react_clip.bench.plan import SWEEPS, Bench, Point
from react_clip.bench.race import Race, compare, run
from react_clip.bench.shapes import SHAPES, random_encoder
from react_clip.bench.syncs import host_syncs
from react_clip.bench.timing import Contender, Ratio, Timing, speedup
from react_clip.bench.traffic import Traffic, gate_scores, synthetic_photos

__all__ = [
    "BARE",
    "OURS",
    "PLAIN",
    "PUBLISHED",
    "SHAPES",
    "SWEEPS",
    "Bench",
    "Contender",
    "Point",
    "Race",
    "Ratio",
    "Roofline",
    "Timing",
    "Traffic",
    "compare",
    "contenders",
    "gate_scores",
    "host_syncs",
    "random_encoder",
    "roofline",
    "run",
    "speedup",
    "synthetic_photos",
]
