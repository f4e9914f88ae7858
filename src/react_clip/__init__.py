"""react-clip: defend CLIP against adversarial images at test time, and measure how well that works.

The names below are imported on first use: ``import react_clip`` alone does not import torch.

>>> import react_clip as rc
>>> rc.ReACT().tau
0.7
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from react_clip.environment import __version__
from react_clip.errors import ReactClipError

if TYPE_CHECKING:
    from react_clip import attacks, data, defenses, integrations, scale
    from react_clip.bank import LabelBank
    from react_clip.calibration import Calibration, calibrate
    from react_clip.defenses import Defended, ReACT, SecondLook, Undefended, as_module
    from react_clip.encoders import Encoder, load, pull
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
    "SecondLook",
    "Undefended",
    "ZeroShotClassifier",
    "__version__",
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

OWNERS = {
    "Calibration": "calibration",
    "Defended": "defenses",
    "Encoder": "encoders",
    "EvaluationResult": "evaluation",
    "LabelBank": "bank",
    "ReACT": "defenses",
    "SecondLook": "defenses",
    "Undefended": "defenses",
    "ZeroShotClassifier": "zeroshot",
    "as_module": "defenses",
    "calibrate": "calibration",
    "evaluate": "evaluation",
    "load": "encoders",
    "pull": "encoders",
}
"""Module of each public name that is imported on first use."""

if not TYPE_CHECKING:  # type checkers read the imports above instead, and find misspelt names

    def __getattr__(name: str) -> Any:
        """Import a public name, or a public module, on first use."""
        if name in OWNERS:
            value = getattr(import_module(f"react_clip.{OWNERS[name]}"), name)
        elif name in __all__:
            value = import_module(f"react_clip.{name}")
        else:
            raise AttributeError(f"module 'react_clip' has no attribute {name!r}")
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        """Public names, imported or not."""
        return sorted(set(globals()) | set(__all__))
