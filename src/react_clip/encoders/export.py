"""An image tower as a graph for ONNX Runtime or OpenVINO, checked against the tower before anybody sees it."""

from __future__ import annotations

import json
import tempfile
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from react_clip import noise
from react_clip.encoders.base import Encoder, quiet_libraries
from react_clip.encoders.exported import FORMATS, RECORD, SCHEMA, ExportedEncoder, Graph, open_graph
from react_clip.environment import versions
from react_clip.errors import ReactClipError, first_line
from react_clip.optional import require
from react_clip.preprocess import RESIZE_RATIO
from react_clip.storage import sha256_of, write_text

TOLERANCE = 1e-4
"""Most that a unit feature may differ in any number; fp32 runtimes differ by about 1e-6."""
_NOISE = 0.1
"""Scale of the noisy views that are compared beside the photos: what a defence encodes is mostly noisy views."""


@dataclass(frozen=True)
class Parity:
    """How far the exported graph is from the tower it was made from."""

    images: int
    max_difference: float
    """Largest difference in any number of any unit feature."""
    min_cosine: float


class _PixelsToFeatures(nn.Module):
    """What is exported: everything behind the check of the pixels."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, pixels: Tensor) -> Tensor:
        return self.encoder.encode_views(pixels)


def export(encoder: Encoder, kind: str, folder: Path, photos: Tensor, *, tolerance: float = TOLERANCE) -> Parity:
    """Write the image tower to a new folder, as :func:`react_clip.load` reads it; nothing is left of a failure.

    ``photos`` ``[B, 3, S, S]`` in [0, 1], and noisy views of them, go through the tower and through the graph; a
    difference above ``tolerance`` is a failure.
    """
    _check(encoder, kind, folder)
    encoder.check(photos)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as scratch:
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
            # The mkdtemp above is private, the folder in it is not: what is published has ordinary permissions.
            finished.rename(folder)
    except OSError as error:
        raise ReactClipError(f"cannot write {folder}: {error.strerror or error}; choose another --out") from error
    return parity


@torch.no_grad()
def measure_parity(encoder: Encoder, graph: Graph, photos: Tensor) -> Parity:
    """The tower and its graph on the same photos, on noisy views of them, and on one photo alone."""
    sigma = torch.full((len(photos),), _NOISE)
    views = torch.cat([photos, noise.noisy_view(photos, noise.stream_keys(photos, 0), sigma)])
    expected = encoder.encode_views(views)
    found = torch.cat([torch.from_numpy(graph(part.numpy())) for part in (views[:1], views[1:])])
    difference = (found - expected).abs().max().item()
    cosine = (found.double() * expected.double()).sum(1).min().item()
    return Parity(len(views), difference, cosine)


def _check(encoder: Encoder, kind: str, folder: Path) -> None:
    if kind not in FORMATS:
        raise ReactClipError(f"there is no format {kind!r}; choose one of {', '.join(FORMATS)}")
    if isinstance(encoder, ExportedEncoder):
        raise ReactClipError(f"{encoder.name!r} is an exported tower already; export {encoder.original!r}")
    if encoder.dtype != torch.float32 or encoder.device.type != "cpu":
        raise ReactClipError(f"{encoder.name!r} is in {encoder.dtype} on {encoder.device}; export from fp32 on the CPU")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ReactClipError(f"{folder} is there already; remove it, or choose another --out")


def _write_graph(encoder: Encoder, kind: str, folder: Path) -> None:
    purpose = f"exporting to {kind}"
    for package in ("onnx", "onnxscript"):
        require(package, purpose, extra="export")
    onnx_file = folder / FORMATS["onnx"][0]
    try:
        _write_onnx(encoder, onnx_file)
        if kind == "openvino":
            openvino = require("openvino", purpose, extra="export")
            model = openvino.convert_model(str(onnx_file))
            openvino.save_model(model, str(folder / FORMATS["openvino"][0]), compress_to_fp16=False)
            onnx_file.unlink()
    except (OSError, ReactClipError):
        raise
    except Exception as error:  # exporters raise almost anything
        reason = first_line(error)
        raise ReactClipError(
            f"{encoder.name!r} cannot be exported to {kind} ({reason}); nothing was written"
        ) from error


def _write_onnx(encoder: Encoder, path: Path) -> None:
    # Two images as an example: a batch of one would be taken for a constant.
    example = torch.zeros(2, 3, encoder.image_size, encoder.image_size)
    shapes = {"pixels": {0: torch.export.Dim("batch", min=1)}}
    with quiet_libraries(), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            _PixelsToFeatures(encoder).eval(),
            (example,),
            path,
            input_names=["pixels"],
            output_names=["features"],
            dynamic_shapes=shapes,
            dynamo=True,
            external_data=False,
            verbose=False,
        )


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
