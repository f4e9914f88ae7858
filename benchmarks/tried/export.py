"""The exported tower in ONNX Runtime and OpenVINO beside PyTorch, on the same CPU with the same number of threads."""

from __future__ import annotations

from benchmarks.tried.common import MODEL, finish, photos, read_options, turns

import react_clip as rc
from react_clip import storage
from react_clip.encoders.export import export


def main() -> None:
    args = read_options("export", device="cpu", photos=2, batch=4, rounds=3)
    encoder, real = rc.load(MODEL, device="cpu"), photos(args)
    place = storage.cache_dir() / "tried-export"
    for kind in ("onnx", "openvino"):
        if not (place / kind).is_dir():  # half a minute each, once
            export(encoder, kind, place / kind, real)
    towers = {
        "torch fp32": encoder,
        "torch bf16": rc.load(MODEL, device="cpu", dtype="bf16"),
        "onnx": rc.load(f"onnx:{place / 'onnx'}"),
        "openvino": rc.load(f"openvino:{place / 'openvino'}"),
        "openvino bf16": rc.load(f"openvino:{place / 'openvino'}", dtype="bf16"),
    }
    batch = real[:1].repeat(args.batch, 1, 1, 1)
    spent = turns(args, {name: (lambda each=each: each.encode_views(batch)) for name, each in towers.items()})
    exact = encoder.encode_views(real)
    agreement = {name: (each.encode_views(real) * exact).sum(1).min().item() for name, each in towers.items()}
    finish(
        args,
        idea="other runtimes",
        what=" ".join((__doc__ or "").split()),
        before=spent["torch fp32"],
        after=min(spent["onnx"], spent["openvino"]),
        milliseconds_per_image=spent,
        agreement={"smallest_cosine_to_torch_fp32": agreement},
        kept=True,
        why="as `react-clip export`, for those who deploy on these runtimes; PyTorch stays the default",
    )


if __name__ == "__main__":
    main()
