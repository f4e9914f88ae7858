"""Image towers for other runtimes: ``onnx:FOLDER`` runs in ONNX Runtime, ``openvino:FOLDER`` in OpenVINO.

:func:`export` writes a folder with a graph from [0, 1] pixels to unit features (normalisation inside, any number of
images), a second one for smaller images where the tower takes them, and a record of their source; both are compared
with the tower before the folder appears. Graphs run on the CPU, have no text tower and give no gradients: every defence
that needs neither works as with the original tower.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from react_clip import functional, noise
from react_clip.augment import smaller_copy
from react_clip.choices import EXPORT_FORMATS, EXPORT_TOLERANCE
from react_clip.encoders.base import Encoder
from react_clip.encoders.loading import quiet_libraries, resolve_device, resolve_dtype
from react_clip.environment import versions
from react_clip.errors import ReactClipError, first_line
from react_clip.optional import require
from react_clip.preprocess import Preprocessing
from react_clip.storage import check_new_folder, read_json, sha256_of, write_text

RECORD, SCHEMA = "encoder.json", 1
FULL, SMALL = "encoder", "encoder-small"
"""Names of the graphs, without ending: at the tower's image size, and at the size of ``rc.SecondLook``'s look."""
SMALL_SHARE = 176 / 224
"""Size of the small graph as a share of the tower's."""
PRECISIONS = {"onnx": ("fp32",), "openvino": ("fp32", "bf16")}

_NOISE = 0.1
"""Scale of the noisy views that are compared beside the photos: a defence encodes mostly noisy views."""

Graph = Callable[[np.ndarray], np.ndarray]
"""Pixels ``[B, 3, S, S]`` to unit features ``[B, D]``, both fp32."""


class ExportedEncoder(Encoder):
    """Graphs by image size in their runtime; features leave them with unit length."""

    def __init__(self, graphs: dict[int, Graph], record: dict[str, Any], *, name: str, dtype: torch.dtype) -> None:
        sizes = {key: record[key] for key in ("image_size", "dim", "mean", "std")}
        # Exports of earlier versions have one graph and name neither patch size, preprocessing nor similarity.
        preprocessing = Preprocessing(**record["preprocessing"]) if "preprocessing" in record else None
        similarity = functional.Similarity(**record.get("similarity", {}))
        patch_size = record.get("patch_size")
        how: dict[str, Any] = {"preprocessing": preprocessing, "similarity": similarity}
        super().__init__(nn.Identity(), name=name, patch_size=patch_size, **how, **sizes)
        self._graphs = graphs
        self.weights = record["model"]
        self._dtype = dtype
        self._identity = f"{sorted(record['sha256'].items())} {dtype}"

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
                f"{self.name!r} runs outside PyTorch and gives no gradients; load {self.weights!r}, which it was "
                "exported from, or use what needs none (ReACT and its relatives; attacks.Square)"
            )
        graph = self._graphs[pixels.shape[-1]]
        return torch.from_numpy(graph(pixels.detach().float().cpu().contiguous().numpy()))

    def takes(self, size: int) -> bool:
        """True if there is a graph for images of this side."""
        return size in self._graphs

    def accelerate(self) -> Self:
        """Nothing to do: the runtime has compiled the graphs."""
        return self

    def update_positions(self, size: int) -> None:
        """Nothing to do: the position embeddings are inside the graphs."""

    def fingerprint(self) -> str:
        """Short identity of the graph and its precision, for cache keys."""
        return hashlib.sha256(self._identity.encode()).hexdigest()[:16]


# ---------------------------------------------------------------------- loading


def split_name(name: str) -> tuple[str, Path] | None:
    """Format and folder of ``FORMAT:FOLDER``; ``None`` for any other name.

    >>> split_name("onnx:towers/b16")
    ('onnx', PosixPath('towers/b16'))
    """
    kind, colon, folder = name.partition(":")
    return (kind, Path(folder).expanduser()) if colon and kind in EXPORT_FORMATS else None


def load_exported(name: str, *, device: str | torch.device | None, dtype: str | torch.dtype) -> Encoder:
    """Load ``onnx:FOLDER`` or ``openvino:FOLDER``; its files must be the ones that were checked when exported."""
    kind, folder = split_name(name) or ("", Path())
    chosen = resolve_dtype(dtype)
    if device is not None and resolve_device(device).type != "cpu":
        raise ReactClipError(f"{name!r} was asked for on {device}, but exported towers run on the CPU; use cpu")
    if chosen not in map(resolve_dtype, PRECISIONS[kind]):
        known = " or ".join(PRECISIONS[kind])
        raise ReactClipError(f"{name!r} was asked for in {dtype}; {kind} towers compute in {known}")
    record = _checked_record(kind, folder)
    graphs = {size: open_graph(kind, folder / stem, chosen) for size, stem in _graph_names(record).items()}
    return ExportedEncoder(graphs, record, name=name, dtype=chosen)


def _graph_names(record: dict[str, Any]) -> dict[int, str]:
    """Names of the graphs that a record describes, by image size."""
    return {record["image_size"]: FULL} | ({record["small_size"]: SMALL} if record.get("small_size") else {})


def _checked_record(kind: str, folder: Path) -> dict[str, Any]:
    way_out = f"export it again with `react-clip export MODEL --format {kind} --out DIR`"
    record = read_json(folder / RECORD, way_out)
    needed = {"schema", "format", "model", "base", "image_size", "dim", "mean", "std", "sha256"}
    if not isinstance(record, dict) or not needed <= record.keys() or record["schema"] != SCHEMA:
        raise ReactClipError(f"{folder / RECORD} is no record of an exported tower of schema {SCHEMA}; {way_out}")
    if record["format"] != kind:
        raise ReactClipError(f"{folder} holds a tower in {record['format']} format; load {record['format']}:{folder}")
    for file in _files(kind, record):
        if not (folder / file).is_file():
            raise ReactClipError(f"{folder} has no {file}; copy the whole folder, or {way_out}")
        if sha256_of(folder / file) != record["sha256"].get(file):
            raise ReactClipError(f"{folder / file} is not the file that {RECORD} describes; {way_out}")
    return record


def _files(kind: str, record: dict[str, Any]) -> list[str]:
    return [stem + ending for stem in _graph_names(record).values() for ending in EXPORT_FORMATS[kind]]


def open_graph(kind: str, stem: Path, dtype: torch.dtype = torch.float32) -> Graph:
    """The graph ``stem.*`` in its runtime, with as many threads as PyTorch has."""
    runtime = {"onnx": "onnxruntime", "openvino": "openvino"}[kind]
    module = require(runtime, f"a tower in {kind} format", extra="export")
    path = f"{stem}{EXPORT_FORMATS[kind][0]}"
    try:
        return _onnx_graph(module, path) if kind == "onnx" else _openvino_graph(module, path, dtype)
    except Exception as error:  # each runtime has its own errors
        raise ReactClipError(
            f"{runtime} {module.__version__} cannot open {path} ({first_line(error)}); export the tower again"
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
    """Differences between exported graphs and their tower."""

    images: int
    max_difference: float
    """Largest difference in any number of any unit feature."""
    min_cosine: float


def export(encoder: Encoder, kind: str, folder: Path, photos: Tensor, *, tolerance: float = EXPORT_TOLERANCE) -> Parity:
    """Write the image tower to a new folder, as :func:`react_clip.load` reads it; a failure leaves nothing behind.

    ``photos`` ``[B, 3, S, S]`` in [0, 1], and noisy views of them, go through the tower and through the graphs; a
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
            record = _record(encoder, kind)
            graphs = {}
            for size, stem in _graph_names(record).items():
                _write_graph(encoder, kind, finished / stem, size)
                graphs[size] = open_graph(kind, finished / stem)
            parity = measure_parity(encoder, graphs, photos)
            # Written so that NaN fails too.
            if not parity.max_difference <= tolerance:
                raise ReactClipError(
                    f"the exported tower differs from {encoder.name!r} by {parity.max_difference:.2g} (cosine "
                    f"{parity.min_cosine:.6f}), more than {tolerance:g}; nothing was written: use another --format, or "
                    "raise --tolerance knowingly"
                )
            record["sha256"] = {file: sha256_of(finished / file) for file in _files(kind, record)}
            record |= {"parity": asdict(parity), "versions": versions()}
            write_text(finished / RECORD, json.dumps(record, indent=1) + "\n")
            finished.rename(folder)
    except OSError as error:
        raise ReactClipError(f"cannot write {folder}: {error.strerror or error}; choose another --out") from error
    return parity


@torch.no_grad()
def measure_parity(encoder: Encoder, graphs: dict[int, Graph], photos: Tensor) -> Parity:
    """Compare the tower and its graphs on photos, on noisy views of them, and on one photo alone."""
    sigma = torch.full((len(photos),), _NOISE)
    noisy = torch.cat([photos, noise.noisy_view(photos, noise.stream_keys(photos, 0), sigma)])
    images, differences, cosines = 0, [], []
    for size, graph in graphs.items():
        views = smaller_copy(noisy, size)
        expected = encoder.encode_views(views)
        exported = torch.cat([torch.from_numpy(graph(part.numpy())) for part in (views[:1], views[1:])])
        differences.append((exported - expected).abs().max().item())
        cosines.append((exported.double() * expected.double()).sum(1).min().item())
        images += len(views)
    return Parity(images, float(np.max(differences)), float(np.min(cosines)))


def _check_request(encoder: Encoder, kind: str, folder: Path) -> None:
    if kind not in EXPORT_FORMATS:
        raise ReactClipError(f"there is no format {kind!r}; choose one of {', '.join(EXPORT_FORMATS)}")
    if isinstance(encoder, ExportedEncoder):
        raise ReactClipError(f"{encoder.name!r} is an exported tower already; export {encoder.weights!r}")
    if encoder.dtype != torch.float32 or encoder.device.type != "cpu":
        raise ReactClipError(f"{encoder.name!r} is in {encoder.dtype} on {encoder.device}; export from fp32 on the CPU")
    check_new_folder(folder)


class _PixelsToFeatures(nn.Module):
    """The part of an encoder that is exported: everything behind the range check."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, pixels: Tensor) -> Tensor:
        return functional.normalize(self.encoder._compute(pixels))


def _write_graph(encoder: Encoder, kind: str, stem: Path, size: int) -> None:
    needed = ("onnx", "onnxscript", *(["openvino"] if kind == "openvino" else []))
    modules = {name: require(name, f"exporting to {kind}", extra="export") for name in needed}
    onnx_file = Path(f"{stem}.onnx")
    # Two images as an example: a batch of one would be taken for a constant.
    example = torch.zeros(2, 3, size, size)
    encoder.update_positions(size)
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
            openvino.save_model(model, f"{stem}{EXPORT_FORMATS[kind][0]}", compress_to_fp16=False)
            onnx_file.unlink()
    except OSError:
        raise
    except Exception as error:  # exporters raise almost anything
        raise ReactClipError(
            f"{encoder.name!r} cannot be exported to {kind} ({first_line(error)}); nothing was written"
        ) from error


def _record(encoder: Encoder, kind: str) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "format": kind,
        "model": encoder.weights,
        "base": encoder.feature_space,
        "fingerprint": encoder.fingerprint(),
        "image_size": encoder.image_size,
        "patch_size": encoder.patch_size,
        "small_size": encoder.size_near(SMALL_SHARE),
        "dim": encoder.dim,
        "pixels": f"float32 RGB [batch, 3, {encoder.image_size}, {encoder.image_size}] in [0, 1]",
        "preprocessing": asdict(encoder.preprocessing),
        "mean": encoder.mean.flatten().tolist(),
        "std": encoder.std.flatten().tolist(),
        "normalisation": "inside the graph",
        "similarity": asdict(encoder.similarity),
    }
