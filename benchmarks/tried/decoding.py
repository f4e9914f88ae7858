"""JPEG files decoded and cropped in worker processes instead of one after the other."""

from __future__ import annotations

import io
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context

from benchmarks.tried.common import expand_inputs, finish, read_options, turns
from PIL import Image

from react_clip.cli.demo import bundled_photos
from react_clip.preprocess import to_pixels


def decode(data: bytes) -> bytes:
    return to_pixels(data, 224).numpy().tobytes()


def as_jpeg(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.convert("RGB").resize((1024, 768)).save(stream, format="JPEG", quality=90)
    return stream.getvalue()


def main() -> None:
    args = read_options("decoding", photos=64, rounds=3)
    args.threads = 0  # by the wall: what other processes work is not in our own time
    files = expand_inputs([args.data]) if args.data else bundled_photos()
    # Camera-sized copies: photos that are kept small decode in no time.
    found = [as_jpeg(Image.open(path)) for path in files[: args.photos]]
    jpegs = [found[i % len(found)] for i in range(args.photos)]
    workers = 2 if args.device.type == "cpu" else 8
    with ProcessPoolExecutor(workers, get_context("spawn")) as processes, ThreadPoolExecutor(workers) as threads:
        spent = turns(
            args,
            {
                "before": lambda: [decode(data) for data in jpegs],
                "after": lambda: list(processes.map(decode, jpegs, chunksize=4)),
                "threads": lambda: list(threads.map(decode, jpegs)),
            },
            images=len(jpegs),
        )
    finish(
        args,
        idea="decoding in worker processes",
        what=" ".join((__doc__ or "").split()),
        before=spent["before"],
        after=spent["after"],
        in_threads=spent["threads"],
        workers=workers,
        kept=False,
        why="Pillow releases the interpreter while it decodes, so threads (which the service has) gain the same "
        "without copying pixels between processes; beside the passes of a defended image decoding is small",
    )


if __name__ == "__main__":
    main()
