r"""Measure ideas for speed beside what is in place, and note each in results/bench/tried.json.

    python benchmarks/tried.py --threads 1 --photos 200 --attacked 16 int8-onnx int8-openvino
    python benchmarks/tried.py --threads 1 --photos 8 decoding
    python benchmarks/tried.py --device cuda --dtype bf16 --out FILE one-graph packed 16-bits

Contenders take turns in one run. Photos are those under ``--data``, classes the head in ``--heads``. Each idea is
written when it is measured; an entry of the same idea, device and precision is replaced. ``int8-openvino`` needs the
package nncf. ``--merge FILE`` takes the entries of another machine over, with the verdicts written here.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import _ideas_cpu as cpu
import _ideas_tower as tower
import torch
from _setting import Entry, Setting

from react_clip import storage

RESULT = Path(__file__).parent / "results" / "bench" / "tried.json"

VERDICTS: dict[str, tuple[bool | None, str]] = {
    "int8 in ONNX Runtime": (
        False,
        "twice as fast, but a fifth of the clean photos get another answer: a tensor's activations share one scale",
    ),
    "int8 in OpenVINO": (
        False,
        "nearly twice as fast, but one clean photo in twenty-five gets another answer; 99.9 % of photos were to agree",
    ),
    "int8 on a GPU": (
        False,
        "no faster than bf16: the tokens are rounded by a kernel of their own before every product; and one clean "
        "photo in twelve gets another decision than in fp32, while 99.9 % were to agree",
    ),
    "weights packed for oneDNN": (
        True,
        "with `load(..., compile=True)` and in the service, in bf16 on x86 (here with AMX), for 164 MiB more; "
        "SecondLook of one image takes 0.73 of the time, of eight 0.98. Not in fp32, where eight images gain nothing, "
        "for 330 MiB",
    ),
    "images in parts": (
        True,
        "for vision transformers on a CPU, everywhere: 32 photos take 51 MiB beyond the weights instead of 203; the "
        "time is the same within the noise of a shared machine",
    ),
    "JPEG at reduced size": (
        False,
        "the look is made from the pixels of the image, so it is not decoded at all; for the image itself it would "
        "change the pixels that the encoder gets, hence answers",
    ),
    "HMAC-SHA256 for secrets": (
        True,
        "processors have instructions for it; the service and the library hash every photo, or every one that takes "
        "the third view, on the CPU",
    ),
    "one graph for image and look": (
        True,
        "with `load(..., compile=True)` and in the service, for at most 144 images: less to launch for the host",
    ),
    "both sizes in one pass": (
        True,
        "in the same graph, for at most 16 images: one image does not keep a GPU busy, so the look's tokens cost "
        "little beside it; larger batches are faster side by side. On x86 for one image, whose two passes would read "
        "all weights twice; with four the gain is within the noise",
    ),
    "graph of the comparison": (
        True,
        "with `load(..., compile=True)`, for at most 16 images: since the GPU encodes an image in less than a "
        "millisecond, the host launches these operations too slowly one by one",
    ),
    "patches by a matrix product": (
        True,
        "patches do not overlap, so it is the same sum; cuDNN's convolution rearranges the pixels twice",
    ),
    "QuickGELU as one kernel": (
        True,
        "with `load(..., compile=True)` in fp32 and on GPUs before Hopper; the kernel rounds after each of the three "
        "operations as PyTorch does, so features have the same bits",
    ),
    "QuickGELU in parts": (
        True,
        "on a CPU, everywhere: a part stays in the cache, and a large batch needs no fresh memory for two more tensors "
        "as large as the hidden layer",
    ),
    "linear layer and QuickGELU as one kernel": (
        True,
        "with `load(..., compile=True)` and in the service, in 16 bits, from Hopper on; cuBLAS is faster without the "
        "activation, but the hidden layer is written and read once less; it rounds once instead of four times",
    ),
    "smaller copies by a kernel": (
        True,
        "with `load(..., compile=True)` and in the service; PyTorch's kernel computes the same few weights for every "
        "pixel again",
    ),
    "pixels normalised by a kernel": (True, "with `load(..., compile=True)` and in the service; the same bits"),
    "patches added in place": (False, "no faster"),
    "addition and LayerNorm as one kernel": (
        True,
        "with `load(..., compile=True)`, in 16 bits; the sums have the same bits, the normalised "
        "tokens are equal up to rounding",
    ),
    "attention by cuDNN": (True, "PyTorch chooses it by itself on this GPU"),
    "compiled tower, any batch size": (
        False,
        "slower than the kernels of `compile=True`, which came later; up to 20 seconds of compilation for each of "
        "three image sizes, none for other batch sizes; a CPU gains nothing",
    ),
    "compiled tower of transformers": (
        False,
        "faster than transformers' own layers, but slower than the layers of the offline tower with the same weights",
    ),
    "compiled tower of open_clip": (False, "slower"),
    **dict.fromkeys(
        ("weights of transformers in our tower", "weights of open_clip in our tower"),
        (True, "with `load(..., compile=True)` and in the service: our layers have kernels and do less work"),
    ),
    "fp8 tower": (
        False,
        "a tenth faster than the compiled bf16 tower, but one clean photo in ten gets another decision or answer than "
        "in fp32; 99.9 % were to agree",
    ),
    "16 bits for SecondLook": (True, "`dtype` of `load`; fp16 is what the service takes on a GPU"),
    "one product for queries, keys and values": (
        True,
        "with `load(..., compile=True)` and in the service: small batches get fewer and larger "
        "products; large ones gain 1 to 2 %",
    ),
    "moved copies by two kernels": (
        True,
        "with `load(..., compile=True)` and in the service; the same random numbers, pixels equal up to rounding",
    ),
    "attention of all sizes by one kernel": (
        True,
        "with `load(..., compile=True)` and in the service, in 16 bits, for at most 16 images; needs PyTorch 2.10",
    ),
    "image and look side by side": (
        True,
        "with `load(..., compile=True)` and in the service, for more than 16 images: one pass fills the "
        "multiprocessors that the last blocks of the other's kernels leave idle; each view has the bits of a pass of "
        "its own",
    ),
    "class token alone in the last block": (
        True,
        "in our tower: the same sums in less time; transformers and open_clip compute all tokens",
    ),
    "look stopped at an early layer": (
        False,
        "half the time, and the distance after six layers finds all of 32 images attacked with 1/255 (78 % after the "
        "last), but also 72 % of photos stored as JPEG of quality 50 (3 % after the last); its "
        "class needs all layers",
    ),
}
"""By idea: whether it is kept, and why."""

IDEAS: dict[str, Callable[[Setting], Entry]] = {
    "int8-onnx": cpu.int8_onnx,
    "int8-openvino": cpu.int8_openvino,
    "packed-weights": cpu.packed_weights,
    "images-in-parts": cpu.images_in_parts,
    "decoding": cpu.decoding,
    "keyed-hash": cpu.keyed_hash,
    "one-graph": tower.one_graph,
    "comparison": tower.comparison,
    "packed": tower.packed,
    "patches": tower.patches,
    "activation": tower.activation,
    "activation-in-parts": tower.activation_in_parts,
    "linear-activation": tower.linear_activation,
    "normalising": tower.normalising,
    "positions": tower.positions_in_place,
    "resizing": tower.resizing,
    "add-norm": tower.add_norm,
    "attention": tower.attention,
    "own-layers-transformers": partial(tower.own_layers, "transformers"),
    "own-layers-open_clip": partial(tower.own_layers, "open_clip"),
    "qkv": tower.qkv,
    "moving": tower.moving,
    "one-attention": tower.one_attention,
    "side-by-side": tower.side_by_side,
    "last-block": tower.last_block,
    "16-bits": tower.sixteen_bits,
    "int8-gpu": tower.int8_tower,
    "early-layer": tower.early_layer,
}


def profile(setting: Setting) -> None:
    """Print where SecondLook spends its time on one batch."""
    call = setting.defended(setting.clf, setting.clean[: setting.batch], setting.batch)
    call()
    kind = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kind.CPU, *([kind.CUDA] if setting.gpu else [])]) as profiler:
        call()
        setting.wait()
    order = "self_device_time_total" if setting.gpu else "self_cpu_time_total"
    print(profiler.key_averages().table(sort_by=order, row_limit=30, max_name_column_width=90), flush=True)


def merge(entries: list[Entry], path: Path) -> None:
    """Write entries into a result file; those of the same idea, device and precision are replaced."""

    def key(entry: Entry) -> tuple[str, ...]:
        return entry["idea"], entry["device"], entry["dtype"]

    known = {key(entry): entry for entry in (json.loads(path.read_text("utf-8")) if path.is_file() else [])}
    known |= {key(entry): {"kept": None, "why": "not decided yet", **entry} for entry in entries}
    for entry in known.values():
        if entry["idea"] in VERDICTS:
            entry["kept"], entry["why"] = VERDICTS[entry["idea"]]
    storage.write_text(path, json.dumps(list(known.values()), indent=1) + "\n")


def main() -> None:
    """Measure the ideas that were named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ideas", nargs="*", metavar="NAME", help=f"one of {', '.join(IDEAS)}")
    parser.add_argument("--device", help="cpu or cuda (CUDA if there is one)")
    parser.add_argument("--dtype", default="fp32", help="precision of the tower (%(default)s)")
    parser.add_argument("--data", type=Path, default=Path("photos/imagenet/test"), help="photos (%(default)s)")
    parser.add_argument("--heads", type=Path, default=Path("heads"), help="folder of imagenet.npz (%(default)s)")
    parser.add_argument("--photos", type=int, default=128, help="number of photos (%(default)s)")
    parser.add_argument("--attacked", type=int, default=0, help="number of them that are attacked too (%(default)s)")
    parser.add_argument("--batch", type=int, help="images in a batch (128 on a GPU, 4 on a CPU)")
    parser.add_argument("--rounds", type=int, help="turns of every contender; the median counts (7 and 3)")
    parser.add_argument("--threads", type=int, help="of PyTorch on a CPU (its own choice)")
    parser.add_argument("--out", type=Path, default=RESULT, help="the result (%(default)s)")
    parser.add_argument("--merge", type=Path, help="take over the entries of this file")
    parser.add_argument("--profile", action="store_true", help="print where the time of one batch goes")
    args = parser.parse_args()
    if unknown := sorted(set(args.ideas) - set(IDEAS)):
        parser.error(f"unknown: {', '.join(unknown)}; known are {', '.join(IDEAS)}")
    if args.merge:
        merge(json.loads(args.merge.read_text("utf-8")), args.out)
    if not (args.ideas or args.profile):
        return
    setting = Setting(args)
    with torch.no_grad():
        if args.profile:
            profile(setting)
        for name in args.ideas:
            begin = time.perf_counter()
            setting.name = name
            print(f"-- {name}", flush=True)
            try:
                entry = IDEAS[name](setting)
            except Exception as error:  # the other ideas are still worth their time
                print(f"   failed: {type(error).__name__}: {error}", flush=True)
                continue
            merge([entry], args.out)
            numbers = f"{entry['before']:.4g} -> {entry['after']:.4g} ms ({entry['ratio']:.3f} x)"
            print(f"   {numbers}, {time.perf_counter() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
