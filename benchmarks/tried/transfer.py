"""Photos copied to the GPU from pinned memory while the one before them is encoded."""

from __future__ import annotations

import torch
from benchmarks.tried.common import finish, random_pixels, read_options, tower, turns


def main() -> None:
    args = read_options("transfer")
    texts = {"idea": "pinned and overlapped transfer", "what": " ".join((__doc__ or "").split())}
    if args.device.type != "cuda":
        finish(args, **texts, before=None, after=None, kept=False, why="there is nothing to transfer on a CPU")
        return
    encoder = tower(args)
    plain = [random_pixels(args).cpu() for _ in range(8)]
    pinned = [batch.pin_memory() for batch in plain]
    copier = torch.cuda.Stream()

    def one_after_the_other() -> None:
        for batch in plain:
            encoder.encode_views(batch.to(args.device))

    def overlapped() -> None:
        for batch in pinned:
            with torch.cuda.stream(copier):
                moved = batch.to(args.device, non_blocking=True)
            torch.cuda.current_stream().wait_stream(copier)
            moved.record_stream(torch.cuda.current_stream())
            encoder.encode_views(moved)

    spent = turns(args, {"before": one_after_the_other, "after": overlapped}, images=8 * args.batch)
    finish(
        args,
        **texts,
        **spent,
        kept=False,
        why="a batch crosses once and is then encoded 4 to 14 times; what is left to gain is measured here",
    )


if __name__ == "__main__":
    main()
