"""Noise drawn behind the patch embedding: it is linear, conv(x + s n) = conv(x) + s conv(n), and conv(n) is Gaussian.

A patch of p x p pixels has 3 p^2 numbers and 768 channels: 768 -> 768 for B/16, where there is no smaller space, and
3072 -> 768 for B/32. The channels are correlated, so 768 independent numbers go through a square root of W W^T.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from benchmarks.tried.common import finish, random_pixels, read_options, tower, turns

from react_clip import noise


def main() -> None:
    args = read_options("patch_space")
    pixels = random_pixels(args)
    keys, sigma = noise.stream_keys(pixels, 0), torch.full((args.batch,), 0.05, device=args.device)
    results = {}
    for patch in (16, 32):
        # The weights of B/16; for B/32 their shape alone matters to the clock.
        weight = tower(args).tower.vision_model.embeddings.patch_embedding.weight.detach().float()
        weight = weight if patch == 16 else torch.randn(768, 3, 32, 32, device=args.device) * weight.std()
        flat = weight.flatten(1).double()
        root = torch.linalg.cholesky(flat @ flat.T + 1e-9 * torch.eye(768, device=args.device)).float()
        tokens = (224 // patch) ** 2
        embedded = F.conv2d(pixels, weight, stride=patch).flatten(2).transpose(1, 2)

        def in_pixels(weight: torch.Tensor = weight, patch: int = patch) -> torch.Tensor:
            return F.conv2d(noise.noisy_view(pixels, keys, sigma), weight, stride=patch)

        def in_channels(
            root: torch.Tensor = root, tokens: int = tokens, embedded: torch.Tensor = embedded
        ) -> torch.Tensor:
            return embedded + sigma[:, None, None] * (noise.normal(keys, (tokens, 768)) @ root.T)

        spread = (in_channels() - embedded).std() / (in_pixels().flatten(2).transpose(1, 2) - embedded).std()
        spent = turns(args, {"before": in_pixels, "after": in_channels})
        results[f"B/{patch}"] = spent | {"ratio": spent["after"] / spent["before"], "spread_ratio": spread.item()}
    finish(
        args,
        idea="noise in the patch embedding",
        what=" ".join((__doc__ or "").split()),
        before=results["B/16"]["before"],
        after=results["B/16"]["after"],
        sizes=results,
        agreement={"views": "other draws of the same distribution", "spread_ratio": results["B/16"]["spread_ratio"]},
        kept=False,
        why="B/16 has no smaller space; B/32 draws a quarter of the numbers, but every view would change, a defence "
        "would need to know the inside of each tower, and exported towers could not run it at all",
    )


if __name__ == "__main__":
    main()
