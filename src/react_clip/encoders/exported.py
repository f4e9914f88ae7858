"""Image towers for other runtimes: ``onnx:FOLDER`` runs in ONNX Runtime, ``openvino:FOLDER`` in OpenVINO.

:func:`export` writes a folder with a graph from [0, 1] pixels to unit features (normalisation inside, any number of
images) and a record of its source; the graph is compared with the tower before the folder appears. Graphs run on the
CPU, have no text tower and give no gradients: every defence that needs neither works as with the original tower.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from react_clip import noise
from react_clip.encoders.base import Encoder, quiet_libraries, resolve_device, resolve_dtype
from react_clip.environment import versions
from react_clip.errors import ReactClipError, first_line
from react_clip.optional import require
from react_clip.preprocess import RESIZE_RATIO
from react_clip.storage import read_json, sha256_of, write_text

RECORD, SCHEMA = "encoder.json", 1
FORMATS = {"onnx": ("encoder.onnx",), "openvino": ("encoder.xml", "encoder.bin")}
"""The files of each format; its runtime opens the first."""
PRECISIONS = {"onnx": {torch.float32: "fp32"}, "openvino": {torch.float32: "fp32", torch.bfloat16: "bf16"}}

TOLERANCE = 1e-4
"""Largest accepted difference in any number of a unit feature; fp32 runtimes differ by about 1e-6."""
_NOISE = 0.1
"""Scale of the noisy views that are compared beside the photos: a defence encodes mostly noisy views."""

Graph = Callable[[np.ndarray], np.ndarray]
"""Pixels ``[B, 3, S, S]`` to unit features ``[B, D]``, both fp32."""


class ExportedEncoder(Encoder):
    """A graph in its runtime; features leave it with unit length."""

    def __init__(self, graph: Graph, record: dict[str, Any], *, name: str, dtype: torch.dtype) -> None:
        sizes = {key: record[key] for key in ("image_size", "dim", "mean", "std")}
        super().__init__(_GraphModule(graph), name=name, **sizes)
        self.base = record["base"]
        self._source: str = record["model"]
        self._dtype = dtype
        self._identity = f"{sorted(record['sha256'].items())} {dtype}"

    @property
    def original(self) -> str:
        """The model that was exported."""
        return self._source

    @property
    def device(self) -> torch.device:
        """The CPU: both runtimes compute there."""
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the runtime; features are fp32 in every case."""
        return self._dtype

    def _compute(self, pixels: Tensor) -> Tensor:
        if torch.is_grad_enabled() and pixels.requires_grad:
            raise ReactClipError(
                f"{self.name!r} runs outside PyTorch and gives no gradients; load {self.original!r}, which it was "
                "exported from, or use what needs none (ReACT and its relatives; attacks.Square)"
            )
        features: Tensor = self.tower(pixels.detach().float())
        return features

    def fingerprint(self) -> str:
        """Short identity of the graph and its precision, for cache keys."""
        return hashlib.sha256(self._identity.encode()).hexdigest()[:16]


class _GraphModule(nn.Module):
    """A graph as a module from [0, 1] pixels to unit features; it normalises by itself."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph

    def forward(self, pixels: Tensor) -> Tensor:
        return torch.from_numpy(self.graph(pixels.cpu().contiguous().numpy()))


# ---------------------------------------------------------------------- loading


def split_name(name: str) -> tuple[str, Path] | None:
    """Format and folder of ``FORMAT:FOLDER``; ``None`` for any other name.

    >>> split_name("onnx:towers/b16")
    ('onnx', PosixPath('towers/b16'))
    """
    kind, colon, folder = name.partition(":")
    return (kind, Path(folder).expanduser()) if colon and kind in FORMATS else None


def load_exported(name: str, *, device: str | torch.device | None, dtype: str | torch.dtype) -> Encoder:
    """Load ``onnx:FOLDER`` or ``openvino:FOLDER``; its files must be the ones that were checked when exported."""
    kind, folder = split_name(name) or ("", Path())
    chosen = resolve_dtype(dtype)
    if device is not None and resolve_device(device).type != "cpu":
        raise ReactClipError(f"{name!r} was asked for on {device}, but exported towers run on the CPU; use cpu")
    if chosen not in PRECISIONS[kind]:
        known = " or ".join(PRECISIONS[kind].values())
        raise ReactClipError(f"{name!r} was asked for in {dtype}; {kind} towers compute in {known}")
    record = _checked_record(kind, folder)
    return ExportedEncoder(open_graph(kind, folder, chosen), record, name=name, dtype=chosen)


def _way_out(kind: str) -> str:
    return f"export it again with `react-clip export MODEL --format {kind} --out DIR`"


def _checked_record(kind: str, folder: Path) -> dict[str, Any]:
    way_out = _way_out(kind)
    record = read_json(folder / RECORD, missing=way_out, invalid=way_out)
    needed = {"schema", "format", "model", "base", "image_size", "dim", "mean", "std", "sha256"}
    if not isinstance(record, dict) or not needed <= record.keys() or record["schema"] != SCHEMA:
        raise ReactClipError(f"{folder / RECORD} is no record of an exported tower of schema {SCHEMA}; {way_out}")
    if record["format"] != kind:
        raise ReactClipError(f"{folder} holds a tower in {record['format']} format; load {record['format']}:{folder}")
    for file in FORMATS[kind]:
        if not (folder / file).is_file():
            raise ReactClipError(f"{folder} has no {file}; copy the whole folder, or {way_out}")
        if sha256_of(folder / file) != record["sha256"].get(file):
            raise ReactClipError(f"{folder / file} is not the file that {RECORD} describes; {way_out}")
    return record


def open_graph(kind: str, folder: Path, dtype: torch.dtype = torch.float32) -> Graph:
    """The graph of a folder in its runtime, with as many threads as PyTorch has."""
    runtime = {"onnx": "onnxruntime", "openvino": "openvino"}[kind]
    module = require(runtime, f"a tower in {kind} format", extra="export")
    path = str(folder / FORMATS[kind][0])
    try:
        return _onnx_graph(module, path) if kind == "onnx" else _openvino_graph(module, path, dtype)
    except Exception as error:  # each runtime has its own errors
        raise ReactClipError(
            f"{runtime} {module.__version__} cannot open {path} ({first_line(error)}); {_way_out(kind)}"
        ) from error


def _onnx_graph(onnxruntime: Any, path: str) -> Graph:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda pixels: np.asarray(session.run(None, {"pixels": pixels})[0])


def _openvino_graph(openvino: Any, path: str, dtype: torch.dtype) -> Graph:
    # By default OpenVINO computes in bf16 wherever the processor can; the caller chooses here.
    precision = {torch.float32: "f32", torch.bfloat16: "bf16"}[dtype]
    hints = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    compiled = openvino.Core().compile_model(path, "CPU", hints)
    # A new request for every call: threads may share an encoder.
    return lambda pixels: np.array(compiled.create_infer_request().infer([pixels])[0], dtype=np.float32)


# ---------------------------------------------------------------------- exporting


@dataclass(frozen=True)
class Parity:
    """How far the exported graph is from its tower."""

    images: int
    max_difference: float
    """Largest difference in any number of any unit feature."""
    min_cosine: float


def export(encoder: Encoder, kind: str, folder: Path, photos: Tensor, *, tolerance: float = TOLERANCE) -> Parity:
    """Write the image tower to a new folder, as :func:`react_clip.load` reads it; a failure leaves nothing behind.

    ``photos`` ``[B, 3, S, S]`` in [0, 1], and noisy views of them, go through the tower and through the graph; a
    difference above ``tolerance`` is a failure.
    """
    _check_request(encoder, kind, folder)
    encoder.check(photos)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as scratch:
            # A folder inside the private scratch folder, so that what is published has ordinary permissions.
            finished = Path(scratch) / "finished"
            finished.mkdir()
            _write_graph(encoder, kind, finished)
            parity = measure_parity(encoder, open_graph(kind, finished), photos)
            # Written so that NaN fails too.
            if not parity.max_difference <= tolerance:
                raise ReactClipError(
                    f"the exported tower differs from {encoder.name!r} by {parity.max_difference:.2g} (cosine "
                    f"{parity.min_cosine:.6f}), more than {tolerance:g}; nothing was written: use another --format, or "
                    "raise --tolerance knowingly"
                )
            write_text(finished / RECORD, json.dumps(_record(encoder, kind, finished, parity), indent=1) + "\n")
            finished.rename(folder)
    except OSError as error:
        raise ReactClipError(f"cannot write {folder}: {error.strerror or error}; choose another --out") from error
    return parity


@torch.no_grad()
def measure_parity(encoder: Encoder, graph: Graph, photos: Tensor) -> Parity:
    """Compare the tower and its graph on photos, on noisy views of them, and on one photo alone."""
    sigma = torch.full((len(photos),), _NOISE)
    views = torch.cat([photos, noise.noisy_view(photos, noise.stream_keys(photos, 0), sigma)])
    expected = encoder.encode_views(views)
    exported = torch.cat([torch.from_numpy(graph(part.numpy())) for part in (views[:1], views[1:])])
    difference = (exported - expected).abs().max().item()
    cosine = (exported.double() * expected.double()).sum(1).min().item()
    return Parity(len(views), difference, cosine)


def _check_request(encoder: Encoder, kind: str, folder: Path) -> None:
    if kind not in FORMATS:
        raise ReactClipError(f"there is no format {kind!r}; choose one of {', '.join(FORMATS)}")
    if isinstance(encoder, ExportedEncoder):
        raise ReactClipError(f"{encoder.name!r} is an exported tower already; export {encoder.original!r}")
    if encoder.dtype != torch.float32 or encoder.device.type != "cpu":
        raise ReactClipError(f"{encoder.name!r} is in {encoder.dtype} on {encoder.device}; export from fp32 on the CPU")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ReactClipError(f"{folder} is there already; remove it, or choose another --out")


class _PixelsToFeatures(nn.Module):
    """The part of an encoder that is exported: everything behind the range check."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, pixels: Tensor) -> Tensor:
        return self.encoder.encode_views(pixels)


def _write_graph(encoder: Encoder, kind: str, folder: Path) -> None:
    needed = ("onnx", "onnxscript", *(["openvino"] if kind == "openvino" else []))
    modules = {name: require(name, f"exporting to {kind}", extra="export") for name in needed}
    onnx_file = folder / FORMATS["onnx"][0]
    # Two images as an example: a batch of one would be taken for a constant.
    example = torch.zeros(2, 3, encoder.image_size, encoder.image_size)
    shapes = {"pixels": {0: torch.export.Dim("batch", min=1)}}
    names: dict[str, Any] = {"input_names": ["pixels"], "output_names": ["features"], "dynamic_shapes": shapes}
    try:
        with quiet_libraries(), warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            module = _PixelsToFeatures(encoder).eval()
            torch.onnx.export(module, (example,), onnx_file, **names, dynamo=True, external_data=False, verbose=False)
        if kind == "openvino":
            openvino = modules["openvino"]
            model = openvino.convert_model(str(onnx_file))
            openvino.save_model(model, str(folder / FORMATS["openvino"][0]), compress_to_fp16=False)
            onnx_file.unlink()
    except OSError:
        raise
    except Exception as error:  # exporters raise almost anything
        raise ReactClipError(
            f"{encoder.name!r} cannot be exported to {kind} ({first_line(error)}); nothing was written"
        ) from error


def _record(encoder: Encoder, kind: str, folder: Path, parity: Parity) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "format": kind,
        "model": encoder.name,
        "base": encoder.base,
        "fingerprint": encoder.fingerprint(),
        "image_size": encoder.image_size,
        "dim": encoder.dim,
        "pixels": f"float32 RGB [batch, 3, {encoder.image_size}, {encoder.image_size}] in [0, 1]",
        "resize": f"shorter side to {round(encoder.image_size * RESIZE_RATIO)}, bilinear; centre crop",
        "mean": encoder.mean.flatten().tolist(),
        "std": encoder.std.flatten().tolist(),
        "normalisation": "inside the graph",
        "sha256": {file: sha256_of(folder / file) for file in FORMATS[kind]},
        "parity": asdict(parity),
        "versions": versions(),
    }
