"""What a defence costs, measured side by side in one run: same weights, same images, same precision."""

from react_clip.bench.contenders import BARE, contenders
from react_clip.bench.timing import Contender, Timing, compare

__all__ = ["BARE", "Contender", "Timing", "compare", "contenders"]
