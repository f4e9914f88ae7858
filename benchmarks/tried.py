r"""Measure ideas for speed beside what is in place, and note each in results/bench/tried.json.

    python benchmarks/tried.py --threads 1 --photos 200 --attacked 16 int8-onnx int8-openvino
    python benchmarks/tried.py --threads 1 --photos 8 decoding compiled

Contenders take turns in one run. Photos are those under ``--data``, classes the head in ``--heads``. Each idea is
written when it is measured; an entry of the same idea, device and precision is replaced. ``int8-openvino`` needs the
package nncf. ``--merge FILE`` takes the entries of another machine over, with the verdicts written here.
"""

from __future__ import annotations

import argparse
import io
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

import react_clip as rc
from react_clip import storage
from react_clip.attacks import PGD
from react_clip.encoders import exported
from react_clip.encoders.base import Encoder
from react_clip.encoders.loading import resolve_device, resolve_dtype
from react_clip.environment import device_name, versions
from react_clip.preprocess import to_pixels

Entry = dict[str, Any]
Ways = dict[str, Callable[[], object]]

MODEL = "clip-vit-b-16"
RESULT = Path(__file__).parent / "results" / "bench" / "tried.json"
SIZES = (224, 176, 160)
"""Sides of the image, the look and the moved look."""

# ---------------------------------------------------------------------- verdicts, written after the measurements

VERDICTS: dict[str, tuple[bool | None, str]] = {
    "int8 in ONNX Runtime": (
        False,
        "twice as fast, but a fifth of the clean photos get another answer: a tensor's activations share one scale",
    ),
    "int8 in OpenVINO": (
        False,
        "nearly twice as fast, but one clean photo in twenty-five gets another answer; 99.9 % of photos were to agree",
    ),
    "compiled tower, any batch size": (
        False,
        "on this CPU no faster, and code for one image size took minutes to generate; not measured on a GPU",
    ),
    "JPEG at reduced size": (
        False,
        "the look is made from the pixels of the image, so it is not decoded at all; for the image itself it would "
        "change the pixels that the encoder gets, hence answers",
    ),
}
"""By idea: whether it is kept, and why."""


# ---------------------------------------------------------------------- setting


class Setting:
    """Options, photos and classifiers of a run; photos are read and attacked once."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.name = ""  # of the idea that is being measured
        self.device, self.dtype = resolve_device(args.device), resolve_dtype(args.dtype)
        self.gpu = self.device.type == "cuda"
        self.batch: int = args.batch or (256 if self.gpu else 4)
        self.rounds: int = args.rounds or (7 if self.gpu else 3)
        if args.threads:
            torch.set_num_threads(args.threads)
        # One thread counts its own processor time, which other programs on the machine do not change.
        self.clock = time.process_time if not self.gpu and args.threads == 1 else time.perf_counter

    def load(self, compile: bool = False) -> Encoder:
        """Another copy of the tower."""
        return rc.load(MODEL, device=self.device, dtype=self.dtype, compile=compile)

    def classifier(self, encoder: Encoder) -> rc.ZeroShotClassifier:
        """ImageNet's classes."""
        with np.load(self.args.heads / "imagenet.npz") as head:
            names, features = head["folders"].tolist(), torch.from_numpy(head["features"])
        return rc.ZeroShotClassifier.from_features(encoder, names, features.to(encoder.device))

    @cached_property
    def clf(self) -> rc.ZeroShotClassifier:
        """ImageNet's classes on the tower as shipped, which ideas are compared with; on a GPU with CUDA graphs."""
        return self.classifier(self.load(compile=True))

    @cached_property
    def clean(self) -> Tensor:
        """``--photos`` photos ``[N, 3, S, S]``, spread over the folder."""
        files = sorted(path for path in self.args.data.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
        files = files[:: max(1, len(files) // self.args.photos)][: self.args.photos]
        return self.clf.encoder.prepare(files)

    @cached_property
    def attacked(self) -> Tensor:
        """The first ``--attacked`` photos, attacked by PGD at 4/255 against the answers of undefended CLIP."""
        attack, parts = PGD(eps=4 / 255, steps=10), self.clean[: self.args.attacked].split(64)
        with torch.enable_grad():
            return torch.cat([attack(self.clf, part, self.clf(part).argmax(-1), seed=0).images for part in parts])

    def turns(self, ways: Ways, images: int) -> dict[str, float]:
        """Milliseconds per image of each way: the median over rounds in which they take turns."""
        spent: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(self.rounds + 1):
            for name, way in ways.items():
                self.wait()
                begin = self.clock()
                way()
                self.wait()
                if turn:  # the first round warms up
                    spent[name].append(self.clock() - begin)
        return {name: 1000 * statistics.median(times) / images for name, times in spent.items()}

    def wait(self) -> None:
        """Wait for the GPU."""
        if self.gpu:
            torch.cuda.synchronize(self.device)

    def defended(self, clf: rc.ZeroShotClassifier, images: Tensor, batch: int) -> Callable[[], object]:
        """A call that answers all images with SecondLook and reads the labels."""
        guard = rc.SecondLook(max_batch=batch)
        return lambda: [guard(clf, part, seed=0).labels.cpu() for part in images.split(batch)]

    def compare(self, before: rc.ZeroShotClassifier, after: rc.ZeroShotClassifier) -> dict[str, Any]:
        """Milliseconds per image of the plain encoder and of SecondLook by batch size, each before and after."""
        found: dict[str, Any] = {}
        for batch in sorted({1, 8, self.batch} if self.gpu else {1, self.batch}):
            images = self.clean[: max(batch, 32 if self.gpu else 1)]
            images = self.clean if self.gpu and batch == self.batch else images
            for name, of in (("plain", self.plain), ("second look", self.defended)):
                ways = {"before": of(before, images, batch), "after": of(after, images, batch)}
                found[f"{name}, batch {batch}"] = self.turns(ways, len(images))
        return found

    def plain(self, clf: rc.ZeroShotClassifier, images: Tensor, batch: int) -> Callable[[], object]:
        """A call that encodes all images."""
        return lambda: [clf.encoder.encode_views(part) for part in images.split(batch)]

    @cached_property
    def expected(self) -> dict[str, tuple[Tensor, dict[str, Tensor]]]:
        """Photos of each kind, and what SecondLook says about them with the encoder that is in place."""
        kinds = {"clean": self.clean, **({"attacked": self.attacked} if self.args.attacked else {})}
        return {kind: (images, self.answers(self.clf, images)) for kind, images in kinds.items()}

    def agreement(self, clf: rc.ZeroShotClassifier) -> dict[str, Any]:
        """Share of photos for which SecondLook decides and answers as with the encoder that is in place."""
        return {kind: agree(known, self.answers(clf, images)) for kind, (images, known) in self.expected.items()}

    def answers(self, clf: rc.ZeroShotClassifier, images: Tensor) -> dict[str, Tensor]:
        """Decisions and answers of SecondLook."""
        guard = rc.SecondLook(max_batch=self.batch)
        parts = []
        for number, part in enumerate(images.split(self.batch)):
            parts.append(guard(clf, part, seed=0))
            if not self.gpu and number % 10 == 9:
                print(f"   {(number + 1) * self.batch} of {len(images)} photos", flush=True)
        names = ("branch", "labels", "drift", "features")
        return {name: torch.cat([getattr(out, name) for out in parts]).cpu() for name in names}

    def entry(self, idea: str, what: str, before: float, after: float, **more: Any) -> Entry:
        """An entry of the result file; ``ratio`` below 1 is faster."""
        kept, why = VERDICTS.get(idea, (None, "not decided yet"))
        return {
            "idea": idea,
            "what": what,
            "unit": "ms per image",
            "before": before,
            "after": after,
            "ratio": after / before,
            **more,
            "kept": kept,
            "why": why,
            "command": shlex.join(["python", *(word for word in sys.argv if word not in IDEAS), self.name]),
            "device": device_name(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "clock": self.clock.__name__,
            "batch": self.batch,
            "rounds": self.rounds,
            "versions": versions(),
        }


def agree(one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, Any]:
    """Shares of equal decisions and answers, and how far the features lie apart."""

    def share(name: str) -> float:
        return (one[name] == other[name]).double().mean().item()

    return {
        "photos": len(one["branch"]),
        "same_gate": share("branch"),
        "same_label": share("labels"),
        "largest_change_of_drift": (one["drift"] - other["drift"]).abs().max().item(),
        "smallest_cosine": (one["features"].double() * other["features"].double()).sum(1).min().item(),
    }


# ---------------------------------------------------------------------- int8 on a CPU


def write_graphs(encoder: Encoder, folder: Path) -> dict[int, Path]:
    """The fp32 tower as ONNX, one file per image size."""
    graphs = {}
    for size in SIZES:
        exported._write_graph(encoder, "onnx", folder / f"tower-{size}", size)
        graphs[size] = folder / f"tower-{size}.onnx"
    return graphs


def graph_encoder(source: Encoder, graphs: dict[int, exported.Graph], name: str) -> Encoder:
    """An encoder that runs these graphs."""
    record = {**exported._record(source, "onnx"), "sha256": {"tower": name}}
    return exported.ExportedEncoder(graphs, record, name=name, dtype=torch.float32)


def int8_entry(setting: Setting, idea: str, what: str, encoder: Encoder, **more: Any) -> Entry:
    """SecondLook with an int8 tower beside fp32 in PyTorch."""
    clf = setting.classifier(encoder)
    speed = setting.compare(setting.clf, clf)
    whole = speed[f"second look, batch {setting.batch}"]
    return setting.entry(idea, what, **whole, milliseconds=speed, agreement=setting.agreement(clf), **more)


def int8_onnx(setting: Setting) -> Entry:
    """Dynamic int8 in ONNX Runtime."""
    import onnx
    import onnxruntime
    from onnxruntime.quantization import QuantType, quantize_dynamic

    encoder = setting.clf.encoder
    with tempfile.TemporaryDirectory() as scratch:
        graphs: dict[int, exported.Graph] = {}
        for size, path in write_graphs(encoder, Path(scratch)).items():
            model = onnx.load(str(path))
            del model.graph.value_info[:]  # shapes of transposed weights confuse the quantiser
            onnx.save(model, str(path))
            target = path.with_suffix(".int8.onnx")
            quantize_dynamic(str(path), str(target), per_channel=True, weight_type=QuantType.QInt8)
            graphs[size] = exported._onnx_graph(onnxruntime, str(target))
        return int8_entry(
            setting,
            "int8 in ONNX Runtime",
            "SecondLook with dynamic int8 (weights by channel, activations by tensor) against fp32 in PyTorch.",
            graph_encoder(encoder, graphs, "int8-onnx"),
        )


def int8_openvino(setting: Setting) -> Entry:
    """Dynamic int8 in OpenVINO."""
    import nncf  # type: ignore[import-not-found, unused-ignore]
    import openvino

    core, encoder, group = openvino.Core(), setting.clf.encoder, 64
    hints = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads()}

    def graph(path: Path) -> exported.Graph:
        model = nncf.compress_weights(core.read_model(str(path)), mode=nncf.CompressWeightsMode.INT8_SYM)
        compiled = core.compile_model(model, "CPU", {**hints, "DYNAMIC_QUANTIZATION_GROUP_SIZE": str(group)})
        return lambda pixels: np.array(compiled.create_infer_request().infer([pixels])[0], dtype=np.float32)

    with tempfile.TemporaryDirectory() as scratch:
        graphs = {size: graph(path) for size, path in write_graphs(encoder, Path(scratch)).items()}
    return int8_entry(
        setting,
        "int8 in OpenVINO",
        f"SecondLook with dynamic int8 (weights by channel, activations by groups of {group}) against fp32 in PyTorch.",
        graph_encoder(encoder, graphs, "int8-openvino"),
        packages={"openvino": openvino.__version__, "nncf": nncf.__version__},
    )


# ---------------------------------------------------------------------- decoding


def decoding(setting: Setting) -> Entry:
    """JPEGs of 12 megapixels, decoded at full and at reduced size."""
    encoder = setting.clf.encoder
    photo = Image.fromarray((setting.clean[0].permute(1, 2, 0).cpu() * 255).byte().numpy())
    files = {}
    for side in (224, 4032):
        grown = photo.resize((side, side * 3 // 4 if side > 224 else side), Image.Resampling.BICUBIC)
        grain = np.random.default_rng(0).normal(0, 4, (grown.height, grown.width, 1))
        grown = Image.fromarray((np.asarray(grown) + grain).clip(0, 255).astype(np.uint8))
        grown.save(written := io.BytesIO(), "JPEG", quality=90)
        files[side] = written.getvalue()

    def whole(side: int) -> Tensor:
        return to_pixels(files[side], encoder.preprocessing)

    def reduced() -> Tensor:
        image = Image.open(io.BytesIO(files[4032]))
        image.draft("RGB", (2 * encoder.image_size, 2 * encoder.image_size))
        return to_pixels(image, encoder.preprocessing)

    ways: Ways = {"224 pixels": lambda: whole(224), "12 megapixels": lambda: whole(4032), "reduced": reduced}
    spent = setting.turns({**ways, "defended": setting.defended(setting.clf, setting.clean[:1], 1)}, 1)
    exact, rough = (encoder(pixels[None].to(setting.device)) for pixels in (whole(4032), reduced()))
    return setting.entry(
        "JPEG at reduced size",
        "A JPEG of 12 megapixels decoded at about twice the encoder's size (`Image.draft`).",
        spent["12 megapixels"],
        spent["reduced"],
        milliseconds=spent,
        share_of_a_defended_photo={
            name: spent[name] / (spent[name] + spent["defended"]) for name in ("224 pixels", "12 megapixels")
        },
        agreement={"cosine": (exact * rough).sum().item()},
    )


# ---------------------------------------------------------------------- the tower


def compiled(setting: Setting) -> Entry:
    """The whole tower through torch.compile, for any batch size."""
    from torch._dynamo.utils import counters

    encoder, images = setting.clf.encoder, setting.clean[: setting.batch]
    function = torch.compile(lambda pixels: encoder.encode_views(pixels))

    def features(pixels: Tensor) -> Tensor:
        pixels = pixels.clone()  # slices of other photos differ in their offset, which would compile it again
        torch._dynamo.mark_dynamic(pixels, 0)
        return function(pixels)

    begin = time.perf_counter()
    features(images)
    seconds, graphs = time.perf_counter() - begin, counters["stats"]["unique_graphs"]
    for batch in range(2, len(images)):
        features(images[:batch])
    ways: Ways = {"before": lambda: encoder.encode_views(images), "after": lambda: features(images)}
    return setting.entry(
        "compiled tower, any batch size",
        "The plain encoder through torch.compile, once for all batch sizes above one.",
        **setting.turns(ways, len(images)),
        compile_seconds=seconds,
        compilations={"first batch": graphs, "other batch sizes": counters["stats"]["unique_graphs"] - graphs},
        agreement={"smallest_cosine": (features(images) * encoder.encode_views(images)).sum(1).min().item()},
    )


IDEAS: dict[str, Callable[[Setting], Entry]] = {
    "int8-onnx": int8_onnx,
    "int8-openvino": int8_openvino,
    "decoding": decoding,
    "compiled": compiled,
}


def merge(entries: list[Entry], path: Path) -> None:
    """Write entries into a result file; those of the same idea, device and precision are replaced."""

    def key(entry: Entry) -> tuple[str, ...]:
        return entry["idea"], entry["device"], entry["dtype"]

    known = {key(entry): entry for entry in (json.loads(path.read_text("utf-8")) if path.is_file() else [])}
    for entry in entries:
        if entry["idea"] in VERDICTS:
            entry["kept"], entry["why"] = VERDICTS[entry["idea"]]
        known[key(entry)] = entry
    storage.write_text(path, json.dumps(list(known.values()), indent=1) + "\n")


def main() -> None:
    """Measure the ideas that were named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ideas", nargs="*", metavar="NAME", help=f"one of {', '.join(IDEAS)}")
    parser.add_argument("--device", help="cpu or cuda (CUDA if there is one)")
    parser.add_argument("--dtype", default="fp32", help="precision of the tower (%(default)s)")
    parser.add_argument("--data", type=Path, default=Path("photos/imagenet/test"), help="photos (%(default)s)")
    parser.add_argument("--heads", type=Path, default=Path("heads"), help="folder of imagenet.npz (%(default)s)")
    parser.add_argument("--photos", type=int, default=512, help="number of photos (%(default)s)")
    parser.add_argument("--attacked", type=int, default=0, help="number of them that are attacked too (%(default)s)")
    parser.add_argument("--batch", type=int, help="images in a batch (256 on a GPU, 4 on a CPU)")
    parser.add_argument("--rounds", type=int, help="turns of every contender; the median counts (7 and 3)")
    parser.add_argument("--threads", type=int, help="of PyTorch on a CPU (its own choice)")
    parser.add_argument("--out", type=Path, default=RESULT, help="the result (%(default)s)")
    parser.add_argument("--merge", type=Path, help="take over the entries of this file")
    args = parser.parse_args()
    if unknown := sorted(set(args.ideas) - set(IDEAS)):
        parser.error(f"unknown: {', '.join(unknown)}; known are {', '.join(IDEAS)}")
    if args.merge:
        merge(json.loads(args.merge.read_text("utf-8")), args.out)
    if not args.ideas:
        return
    setting = Setting(args)
    with torch.no_grad():
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
