r"""CLIPure-Cos (Zhang et al., ICLR 2025): move the feature, not the image, towards the text feature of an empty prompt.

The released code encodes the image once, in half precision, and takes ten steps of 30 in fp32:

.. math:: u \leftarrow \frac{u + s\,g / \lVert g \rVert}{\lVert u + s\,g / \lVert g \rVert \rVert}, \qquad
          g = t - \langle u, t \rangle\,u = \nabla_u \cos(u, t)

with t the prompt's unit feature. All steps stay in the plane of the image's feature and t: only the angle between them
changes, and if it ends on the other side of t, the image's own part of the feature has changed its sign. Momentum is in
the released code with weight 0, hence not here.

The norm of g is one number for all images of a batch, so each of B images moves by about 30 / sqrt(B), and its answer
depends on the others. The released command has batches of two. The turn of a step is then 87 degrees, more than the 75
or so between an image and the prompt: the second step undoes the first, and after ten the feature is back where CLIP
had it. In large batches the image can end on the other side of t.

A step as released takes g as a constant, so with small batches the gradient of the answer shrinks by some 20 to 30 a
step. The code carries the length of the feature along as a function of the pixels. It is always 1 and its derivative 0,
but in fp32 the rounding error of that 0 exceeds the other gradient after six steps: what an attack on the released code
follows is rounding error, and zero in half precision. The length is carried along here too, so that attacks meet it.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from react_clip import functional
from react_clip.config import Count, NonNegative
from react_clip.defenses.base import Defended, Defense, answer
from react_clip.noise import Seed
from react_clip.preprocess import Images
from react_clip.zeroshot import ZeroShotClassifier


class CLIPure(Defense):
    """Ten ascent steps of the feature towards the text feature of an empty prompt; one encoder pass.

    The prompts are the classifier's own templates with an empty name, averaged. An encoder without a text tower takes
    the mean of the class features instead (:meth:`ZeroShotClassifier.empty_prompt`). The released code runs the tower
    in half precision: load the encoder with ``dtype=torch.float16`` for that. Nothing is drawn at random, but with
    ``batch`` > 1, as released, **an answer depends on the image's neighbours**.

    >>> CLIPure().cost()
    (1, 0)
    """

    kind = "clipure"
    label = "CLIPure-Cos"
    colour = "#4477AA"
    steps: Count = 10
    """Ascent steps."""
    step_size: NonNegative = 30.0
    """Length of a step."""
    batch: Count = 2
    """Number of consecutive images over which the gradient is scaled to unit length; 1 makes images independent."""
    graph: Literal["constant", "full", "none"] = "constant"
    """Gradients for an attacker who knows the defence: the direction of each step counts as a constant, as released;
    everything is differentiated; or there are none, and the attacker takes those of undefended CLIP (BPDA with the
    identity). The answer is the same."""

    def cost(self) -> tuple[int, int]:
        """Forward and backward passes of an image."""
        return 1, 0

    def __call__(self, clf: ZeroShotClassifier, images: Images, seed: Seed = 0) -> Defended:
        """Defended answers for pixels in [0, 1], PIL images, paths or bytes; see :class:`Defended`."""
        pixels = clf.encoder.prepare(images)
        wanted = pixels.requires_grad and self.graph != "none"
        with torch.set_grad_enabled(torch.is_grad_enabled() and wanted):
            features = self.purify(clf.encoder.encode_views(pixels), clf.empty_prompt())
            return answer(clf, features, passes=self.cost())

    def purify(self, features: Tensor, prompt: Tensor) -> Tensor:
        """Unit features ``[B, D]`` after all steps towards a unit feature ``[D]``.

        >>> CLIPure(steps=1, step_size=1.0).purify(torch.tensor([[1.0, 0.0]]), torch.tensor([0.0, 1.0]))
        tensor([[0.7071, 0.7071]])
        """
        prompt = prompt.to(features.dtype)
        group = torch.arange(len(features), device=features.device) // self.batch
        for _ in range(self.steps):
            length = torch.linalg.vector_norm(features, dim=1, keepdim=True)
            unit = features / length
            slope = prompt - (unit @ prompt)[:, None] * unit
            if self.graph == "constant":
                slope = slope.detach()
            squares = torch.zeros_like(features[:, 0]).index_add(0, group, slope.square().sum(1))
            # The floor is for features equal to the prompt, where the released code divides by zero.
            step = self.step_size * slope / squares.clamp_min(1e-24).sqrt()[group, None]
            features = length * functional.normalize(unit + step)
        return features
