"""Image towers exported for another runtime: ``onnx:FOLDER`` runs in ONNX Runtime, ``openvino:FOLDER`` in OpenVINO.

The folder holds a graph from [0, 1] pixels to unit features, with the normalisation inside and any number of images,
and a record of what it was made from. It runs on the CPU, reads no text and gives no gradients: every defence that
needs none works with it as with the tower it came from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from react_clip.encoders.base import Encoder, resolve_device, resolve_dtype
from react_clip.errors import ReactClipError, first_line
from react_clip.optional import require
from react_clip.storage import read_json, sha256_of

RECORD, SCHEMA = "encoder.json", 1
FORMATS = {"onnx": ("encoder.onnx",), "openvino": ("encoder.xml", "encoder.bin")}
"""The files of each format; the first is the one that its runtime opens."""
PRECISIONS = {"onnx": (torch.float32,), "openvino": (torch.float32, torch.bfloat16)}

Graph = Callable[[np.ndarray], np.ndarray]
"""Pixels ``[B, 3, S, S]`` to unit features ``[B, D]``, both fp32."""

_WAY_OUT = "export it again with `react-clip export MODEL --format {kind} --out DIR`"


class ExportedEncoder(Encoder):
    """A graph in its runtime."""

    def __init__(self, graph: Graph, record: dict[str, Any], *, name: str, dtype: torch.dtype) -> None:
        super().__init__(
            nn.Identity(),
            name=name,
            image_size=record["image_size"],
            dim=record["dim"],
            mean=record["mean"],
            std=record["std"],
            has_text=False,
        )
        self.base = record["base"]
        self._original: str = record["model"]
        self._graph = graph
        self._dtype = dtype
        self._identity = f"{sorted(record['sha256'].items())} {dtype}"

    @property
    def original(self) -> str:
        """The model that was exported."""
        return self._original

    @property
    def device(self) -> torch.device:
        """Both runtimes compute on the CPU."""
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """What the runtime computes in; features are fp32 all the same."""
        return self._dtype

    def raw_features(self, pixels: Tensor) -> Tensor:
        """The graph's features, which are of unit length already."""
        self._check_shape(pixels)
        if torch.is_grad_enabled() and pixels.requires_grad:
            raise ReactClipError(
                f"{self.name!r} runs outside PyTorch and gives no gradients; load {self.original!r}, which it was "
                "exported from, or use what needs none (ReACT and its relatives; attacks.Square)"
            )
        return self._image_features(pixels.detach().float())

    def _image_features(self, normalised: Tensor) -> Tensor:
        # The graph normalises by itself: these are pixels in [0, 1].
        return torch.from_numpy(self._graph(normalised.cpu().contiguous().numpy()))

    def _text_features(self, prompts: list[str]) -> Tensor:
        raise AssertionError("a graph of an image tower reads no text")

    def fingerprint(self) -> str:
        """Short identity of the graph and its precision, for cache keys."""
        return hashlib.sha256(self._identity.encode()).hexdigest()[:16]


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
        known = {torch.float32: "fp32", torch.bfloat16: "bf16"}
        able = " or ".join(known[each] for each in PRECISIONS[kind])
        raise ReactClipError(f"{name!r} was asked for in {dtype}; {kind} towers compute in {able}")
    record = _checked_record(kind, folder)
    return ExportedEncoder(open_graph(kind, folder, chosen), record, name=name, dtype=chosen)


def open_graph(kind: str, folder: Path, dtype: torch.dtype = torch.float32) -> Graph:
    """The graph of a folder in its runtime, with as many threads as PyTorch has."""
    runtime = {"onnx": "onnxruntime", "openvino": "openvino"}[kind]
    module = require(runtime, f"a tower in {kind} format", extra="export")
    path = str(folder / FORMATS[kind][0])
    try:
        return _onnx_graph(module, path) if kind == "onnx" else _openvino_graph(module, path, dtype)
    except Exception as error:  # each runtime has its own errors
        reason = first_line(error)
        way_out = _WAY_OUT.format(kind=kind)
        raise ReactClipError(f"{runtime} {module.__version__} cannot open {path} ({reason}); {way_out}") from error


def _onnx_graph(onnxruntime: Any, path: str) -> Graph:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda pixels: np.asarray(session.run(None, {"pixels": pixels})[0])


def _openvino_graph(openvino: Any, path: str, dtype: torch.dtype) -> Graph:
    # Left alone, OpenVINO computes in bf16 wherever the processor can: that is for the caller to choose.
    precision = {torch.float32: "f32", torch.bfloat16: "bf16"}[dtype]
    hints = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    compiled = openvino.Core().compile_model(path, "CPU", hints)
    # A request of its own for every call: threads may share an encoder.
    return lambda pixels: np.array(compiled.create_infer_request().infer([pixels])[0], dtype=np.float32)


def _checked_record(kind: str, folder: Path) -> dict[str, Any]:
    way_out = _WAY_OUT.format(kind=kind)
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
