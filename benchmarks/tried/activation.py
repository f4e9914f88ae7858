"""QuickGELU, x sigmoid(1.702 x), as one kernel instead of the three that PyTorch runs for it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from benchmarks.tried.common import finish, first_call, photos, random_pixels, read_options, tower, turns
from torch import Tensor, nn

NAME = "QuickGELUActivation"
"""What transformers calls it."""


class Compiled(nn.Module):
    """An activation through the compiler, whatever the number of images."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self._run: Callable[[Tensor], Tensor] = torch.compile(activation.forward, dynamic=True, fullgraph=True)

    def forward(self, hidden: Tensor) -> Tensor:
        return self._run(hidden)


def main() -> None:
    args = read_options("activation", batch=8, rounds=5, photos=4)
    plain, changed = tower(args), tower(args)
    blocks = [module for module in changed.modules() if type(getattr(module, "activation_fn", None)).__name__ == NAME]
    kernel = Compiled(blocks[0].activation_fn)
    for block in blocks:
        block.activation_fn = kernel
    pixels, real = random_pixels(args), photos(args)
    _, compiling = first_call(args, lambda: changed.encode_views(pixels))
    cosine = torch.cosine_similarity(plain.encode_views(real), changed.encode_views(real))
    spent = turns(args, {"before": lambda: plain.encode_views(pixels), "after": lambda: changed.encode_views(pixels)})
    finish(
        args,
        idea="QuickGELU as one kernel",
        what=" ".join((__doc__ or "").split()),
        **spent,
        blocks=len(blocks),
        compile_seconds=compiling,
        agreement={"least_cosine": cosine.min().item()},
        kept=False,
        why="it rounds once where three kernels round three times, so features move by as much as bf16 is rough, and "
        "the tower would no longer be the library's; who wants the speed compiles the whole tower",
    )


if __name__ == "__main__":
    main()
