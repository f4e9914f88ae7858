"""Scaled-dot-product attention (what both loaders use) against attention written out."""

from __future__ import annotations

from benchmarks.tried.common import finish, random_pixels, read_options, tower, turns


def main() -> None:
    args = read_options("attention", batch=4, rounds=5)
    written_out, sdpa = tower(args), tower(args)
    chosen = sdpa.tower.config._attn_implementation
    written_out.tower.set_attn_implementation("eager")
    pixels = random_pixels(args)
    difference = (written_out.encode_views(pixels) - sdpa.encode_views(pixels)).abs().max().item()
    spent = turns(
        args, {"before": lambda: written_out.encode_views(pixels), "after": lambda: sdpa.encode_views(pixels)}
    )
    finish(
        args,
        idea="SDPA",
        what=" ".join((__doc__ or "").split()),
        **spent,
        implementation=chosen,
        agreement={"max_difference": difference},
        kept=True,
        why="the libraries choose it by themselves; this script would notice if they stopped",
    )


if __name__ == "__main__":
    main()
