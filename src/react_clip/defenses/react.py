"""ReACT-CLIP: response-aware correction at test time."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Self

from react_clip.defenses.anchored import AnchoredDefense
from react_clip.encoders import Encoder
from react_clip.errors import ReactClipError

SETTLED = 0.99
"""Confidence at which no more views are drawn: less than half of the passes of an attacked image, and the same accuracy
to a few hundredths of a point on ten data sets (``benchmarks/results/sequential``)."""

# Which calibration suits which encoder: None is the paper's own, a name is a file of ours.
_CALIBRATIONS = {
    **dict.fromkeys(("openai/clip-vit-base-patch32", "open_clip:ViT-B-32/openai"), None),
    "open_clip:ViT-B-32-quickgelu/openai": None,
    **dict.fromkeys(("clip-vit-b-16", "openai/clip-vit-base-patch16"), "clip-vit-b-16"),
    **dict.fromkeys(("open_clip:ViT-B-16/openai", "open_clip:ViT-B-16-quickgelu/openai"), "clip-vit-b-16"),
}


class ReACT(AnchoredDefense):
    r"""The paper's defence; the defaults are its constants (calibrated for ViT-B/32).

    .. math::
        r = \frac{d_{high} - d_{low}}{d_{low}}, \quad \sigma = a + b r, \quad s = r + J, \quad
        f_{out} = f + 1[s \ge \tau]\,\alpha\,(f_{anc}(\sigma) - f)

    Costs 3, 4, 13 or 14 encoder passes an image, no gradients. With ``sequential=0.99``, as :meth:`for_encoder` ships
    it, an open gate draws two views first and the others only where these do not settle the answer: 5, 6, 13 or 14.

    >>> guard = ReACT(tau=0.4)
    >>> guard.views, guard.alpha, guard.tau, guard.mapping
    (10, 2.0, 0.4, Linear(a=0.03, b=0.042))
    >>> ReACT.from_dict(guard.to_dict()) == guard
    True
    """

    kind = "react"
    colour = "#0072B2"

    @classmethod
    def for_encoder(cls, encoder: Encoder | str) -> Self:
        """What we ship for an encoder: the constants that suit it, and views drawn until the answer is settled.

        Whoever is after the feature rather than the answer takes :meth:`constants_for`, whose anchors have all M views.

        >>> ReACT.for_encoder("openai/clip-vit-base-patch32") == ReACT(sequential=0.99)
        True
        """
        return cls.constants_for(encoder).replace(sequential=SETTLED)

    @classmethod
    def constants_for(cls, encoder: Encoder | str) -> Self:
        """The constants that suit an encoder: the paper's for ViT-B/32, ours for ViT-B/16.

        >>> ReACT.constants_for("openai/clip-vit-base-patch32") == ReACT()
        True
        """
        name = encoder if isinstance(encoder, str) else encoder.original
        name = name.partition("@")[0]
        if name not in _CALIBRATIONS:
            raise ReactClipError(
                f"there is no calibration for {name!r}: the drift of every encoder has its own scale; run `react-clip "
                f"calibrate folder:PHOTOS --model {name}` and load its result, or take the paper's constants knowingly "
                "(rc.ReACT(), --config paper)"
            )
        calibration = _CALIBRATIONS[name]
        if calibration is None:
            return cls()
        return cls.load(Path(str(files("react_clip") / "assets" / "calibrations" / f"{calibration}.json")))
