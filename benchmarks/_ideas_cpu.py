"""Ideas of `tried.py` for CPUs: towers in int8 by other runtimes, JPEGs decoded at reduced size, keys of photos."""

from __future__ import annotations

import hashlib
import io
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _setting import SIZES, Entry, Setting, Ways
from PIL import Image
from torch import Tensor

from react_clip import noise
from react_clip.bench.timing import peak_memory
from react_clip.encoders import exported
from react_clip.encoders.base import Encoder
from react_clip.encoders.layers import PackedLinear
from react_clip.preprocess import to_pixels


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


def packed_weights(setting: Setting) -> Entry:
    """Weights in oneDNN's layout, in fp32 too."""
    before, after = (setting.classifier(setting.load(compile=True)) for _ in range(2))
    for clf in (before, after):
        for layer in clf.encoder.tower.modules():
            if isinstance(layer, PackedLinear):
                layer._packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight, None) if clf is after else None
    speed = setting.compare(before, after)
    one, other = (clf.encoder.encode_views(setting.clean[: setting.batch]) for clf in (before, after))
    return setting.entry(
        "weights packed for oneDNN",
        "Weights kept in the layout of oneDNN's kernels, instead of rearranged in every call: one image, the plain "
        "encoder.",
        **speed["plain, batch 1"],
        milliseconds=speed,
        agreement={"smallest_cosine": (one * other).sum(1).min().item(), "same_bits": torch.equal(one, other)},
    )


def images_in_parts(setting: Setting) -> Entry:
    """A batch on a CPU in parts of about 1,600 tokens."""
    before, after = (setting.classifier(setting.load(compile=True)) for _ in range(2))
    before.encoder.cpu_tokens = 10**9
    speed = setting.compare(before, after)
    images = setting.clean[: setting.batch]
    memory = {
        name: peak_memory(lambda clf=clf: clf.encoder.encode_views(images), setting.device)  # type: ignore[misc]
        for name, clf in (("before", before), ("after", after))
    }
    return setting.entry(
        "images in parts",
        "A batch encoded in parts of 1,600 tokens, which is eight images, instead of all at once: the plain encoder.",
        **speed[f"plain, batch {setting.batch}"],
        milliseconds=speed,
        peak_bytes=memory,
    )


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


def keyed_hash(setting: Setting) -> Entry:
    """The keys of photos under a secret, by BLAKE2b and by HMAC-SHA256."""
    photos, secret = setting.clean.mul(255).round().byte().cpu(), bytes(32)
    ways: Ways = {
        "before": lambda: [hashlib.blake2b(photo.numpy().data, key=secret).digest() for photo in photos],
        "after": lambda: noise.stream_keys(photos, secret),
    }
    return setting.entry(
        "HMAC-SHA256 for secrets",
        "The key of a photo's noise under a secret by HMAC-SHA256 instead of BLAKE2b: the key alone.",
        **setting.turns(ways, len(photos)),
    )
