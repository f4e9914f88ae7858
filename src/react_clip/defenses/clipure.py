r"""CLIPure-Cos (Zhang et al., ICLR 2025): move the feature, not the image, towards the text feature of an empty prompt.

Ten steps of 30:

.. math:: u \leftarrow \frac{u + s\,g / \lVert g \rVert}{\lVert u + s\,g / \lVert g \rVert \rVert}, \qquad
          g = t - \langle u, t \rangle\,u = \nabla_u \cos(u, t)

with t the prompt's unit feature. All steps stay in the plane of the image's feature and t: only the angle between them
changes. A step is longer than that angle, so after ten the feature lies on the side where it began, or on the other
side of t, where the image's own part of the feature has changed its sign.

The released code takes one norm for all images of a batch, so that an answer depends on the image's neighbours; here
every image has its own. It takes g as a constant, so the gradient of the answer shrinks by some 20 to 30 a step. It
carries the length of the feature along as a function of the pixels: always 1, with a derivative of 0, but in fp32 the
rounding error of that 0 exceeds the other gradient after six steps. The length is carried along here too, so that
attacks meet it.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from react_clip.config import Count, NonNegative
from react_clip.defenses.base import Defense
from react_clip.defenses.view import View
from react_clip.errors import ReactClipError
from react_clip.functional import normalize


class CLIPure(Defense):
    """Ten ascent steps of the feature towards the text feature of an empty prompt; one encoder pass.

    The prompts are the classifier's own templates with an empty name, averaged. An encoder without a text tower takes
    the mean of the class features instead (:meth:`ZeroShotClassifier.empty_prompt`). Nothing is drawn at random.

    >>> CLIPure().steps, CLIPure().step_size
    (10, 30.0)
    """

    kind = "clipure"
    label = "CLIPure-Cos"
    colour = "#4477AA"
    removed: ClassVar[dict[str, Any]] = {**Defense.removed, "batch": 1}
    steps: Count = 10
    """Ascent steps."""
    step_size: NonNegative = 30.0
    """Length of a step."""
    graph: Literal["constant", "full", "none"] = "constant"
    """Gradients for an attacker who knows the defence: the direction of each step counts as a constant, as released;
    everything is differentiated; or there are none, and the attacker takes those of undefended CLIP (BPDA with the
    identity). The answer is the same."""

    def defend(self, x: View) -> tuple[Tensor, dict[str, Tensor]]:
        """The moved features."""
        if not x.classifiers:
            raise ReactClipError(
                "clipure needs the prompts of the classes, and there are none; give a classifier with labels"
            )
        prompts = {clf: clf.empty_prompt() for clf in set(x.classifiers)}
        prompt = torch.stack([prompts[clf] for clf in x.classifiers])
        return self.purify(x.plain.detach() if self.graph == "none" else x.plain, prompt), {}

    def purify(self, features: Tensor, prompt: Tensor) -> Tensor:
        """Unit features ``[B, D]`` after all steps towards unit features ``[B, D]``.

        >>> CLIPure(steps=1, step_size=1.0).purify(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]))
        tensor([[0.7071, 0.7071]])
        """
        prompt = prompt.to(features.dtype)
        for _ in range(self.steps):
            length = torch.linalg.vector_norm(features, dim=1, keepdim=True)
            unit = features / length
            gradient = prompt - (unit * prompt).sum(1, keepdim=True) * unit
            if self.graph == "constant":
                gradient = gradient.detach()
            # The floor is for features equal to the prompt, where the released code divides by zero.
            step = self.step_size * gradient / gradient.square().sum(1, keepdim=True).clamp_min(1e-24).sqrt()
            features = length * normalize(unit + step)
        return features
