"""react-clip: defend CLIP against adversarial images at test time, and measure how well that works.

>>> import react_clip as rc
>>> rc.ReACT().tau
0.7
"""

from react_clip import attacks, defenses
from react_clip.bank import LabelBank
from react_clip.defenses import Defended, ReACT, Undefended, as_module
from react_clip.encoders import Encoder, load, pull
from react_clip.errors import ReactClipError
from react_clip.zeroshot import ZeroShotClassifier

__version__ = "0.1.0"

__all__ = [
    "Defended",
    "Encoder",
    "LabelBank",
    "ReACT",
    "ReactClipError",
    "Undefended",
    "ZeroShotClassifier",
    "as_module",
    "attacks",
    "defenses",
    "load",
    "pull",
]
