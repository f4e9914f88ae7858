"""Mean and standard deviation folded into the patch embedding's weights: pixels go in as they are."""

from __future__ import annotations

import copy

import torch
from benchmarks.tried.common import finish, random_pixels, read_options, tower, turns

from react_clip import functional


def main() -> None:
    args = read_options("normalisation", batch=4, rounds=5)
    encoder, pixels = tower(args), random_pixels(args)
    folded = copy.deepcopy(encoder)
    conv = folded.tower.vision_model.embeddings.patch_embedding
    weight = conv.weight.float()
    bias = -(weight * (encoder.mean / encoder.std)).sum((1, 2, 3))
    conv.weight.data = (weight / encoder.std).to(conv.weight.dtype)
    conv.bias = torch.nn.Parameter(bias.to(conv.weight.dtype), requires_grad=False)

    def with_folded() -> torch.Tensor:
        return functional.normalize(folded._image_features(pixels.to(encoder.dtype)).float())

    difference = (with_folded() - encoder.encode_views(pixels)).abs().max().item()
    spent = turns(args, {"before": lambda: encoder.encode_views(pixels), "after": with_folded})
    finish(
        args,
        idea="normalisation folded",
        what=" ".join((__doc__ or "").split()),
        **spent,
        agreement={"max_difference": difference},
        kept=False,
        why="two elementwise steps beside twelve transformer blocks; folding rounds the weights anew (much in bf16) "
        "and the checkpoint's own weights would no longer be the ones that run",
    )


if __name__ == "__main__":
    main()
