"""react-clip: defend CLIP against adversarial images at test time, and measure how well that works.

>>> import react_clip as rc
>>> rc.ReACT().tau
0.7
"""

from react_clip import adaptive, attacks, data, defenses, integrations, scale
from react_clip.bank import LabelBank
from react_clip.calibration import Calibration, calibrate
from react_clip.defenses import Defended, ReACT, Undefended, as_module
from react_clip.encoders import Encoder, load, pull
from react_clip.environment import __version__
from react_clip.errors import ReactClipError
from react_clip.evaluation import EvaluationResult, evaluate
from react_clip.zeroshot import ZeroShotClassifier

__all__ = [
    "Calibration",
    "Defended",
    "Encoder",
    "EvaluationResult",
    "LabelBank",
    "ReACT",
    "ReactClipError",
    "Undefended",
    "ZeroShotClassifier",
    "__version__",
    "adaptive",
    "as_module",
    "attacks",
    "calibrate",
    "data",
    "defenses",
    "evaluate",
    "integrations",
    "load",
    "pull",
    "scale",
]
