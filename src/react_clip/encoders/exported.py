"""Image towers in ONNX Runtime: ``onnx:FOLDER``.

:func:`export` writes a folder with a graph from [0, 1] pixels to unit features (normalisation inside, any number of
images), a second one for smaller images where the tower takes them, and a record of their source; both are compared
with the tower before the folder appears. Graphs run on the CPU, have no text tower and give no gradients: every defence
that needs neither works as with the original tower.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from react_clip import functional, noise
from react_clip.augment import smaller_copy
from react_clip.encoders.base import Encoder
from react_clip.encoders.loading import load_quietly
from react_clip.environment import versions
from react_clip.errors import ReactClipError, first_line
from react_clip.optional import require
from react_clip.preprocess import Preprocessing
from react_clip.storage import check_new_folder, read_json, sha256_of, write_text

PREFIX, RECORD, SCHEMA = "onnx:", "encoder.json", 1
FULL, SMALL = "encoder.onnx", "encoder-small.onnx"
"""The graphs: at the tower's image size, and at the size of ``rc.SecondLook``'s small copy."""
SMALL_FRACTION = 176 / 224
"""Size of the small graph as a fraction of the tower's."""

_FIELDS = {"model", "image_size", "small_size", "patch_size", "dim", "preprocessing", "similarity", "sha256"}
TOLERANCE = 1e-4
"""Largest accepted difference in any number of a unit feature; fp32 runtimes differ by about 1e-6."""
_NOISE = 0.1
"""Scale of the noisy views that are compared beside the photos: a defence encodes mostly noisy views."""


class GraphTower(nn.Module):
    """Graphs by image size; what they compute includes the normalisation and the scaling to unit length."""

    def __init__(self, folder: Path, record: dict[str, Any], name: str) -> None:
        super().__init__()
        runtime = require("onnxruntime", "an exported tower", extra="export")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self.graphs = {
            size: runtime.InferenceSession(str(folder / file), options, providers=["CPUExecutionProvider"])
            for size, file in _graph_files(record).items()
        }
        self.record, self.name = record, name

    def forward(self, pixels: Tensor) -> Tensor:
        """Unit features of pixels ``[B, 3, S, S]`` in [0, 1]; raises where gradients are asked for."""
        if torch.is_grad_enabled() and pixels.requires_grad:
            raise ReactClipError(
                f"{self.name!r} runs outside PyTorch and gives no gradients; load {self.record['model']!r}, which it "
                "was exported from, or use what needs none (ReACT and its relatives; attacks.Square)"
            )
        array = pixels.detach().float().cpu().contiguous().numpy()
        [features] = self.graphs[pixels.shape[-1]].run(None, {"pixels": array})
        return torch.from_numpy(features).to(pixels.device)

    def extra_repr(self) -> str:
        """The digests of the graphs."""
        return str(sorted(self.record["sha256"].items()))


class ExportedEncoder(Encoder):
    """An encoder whose tower is a graph for each size."""

    tower: GraphTower

    def __init__(self, tower: GraphTower) -> None:
        record = tower.record
        sizes = {name: record[name] for name in ("image_size", "dim", "patch_size")}
        how = Preprocessing(**record["preprocessing"]), functional.Similarity(**record["similarity"])
        super().__init__(tower, name=tower.name, mean=[0.0] * 3, std=[1.0] * 3, **sizes)
        self.weights, self.preprocessing, self.similarity = record["model"], *how

    def takes(self, size: int) -> bool:
        """True if there is a graph for images of this side."""
        return size in self.tower.graphs


def load_exported(name: str, *, device: str | torch.device | None, dtype: str | torch.dtype) -> Encoder:
    """Load ``onnx:FOLDER``; its files must be the ones that were checked when exported."""
    folder = Path(name.removeprefix(PREFIX)).expanduser()
    if device not in (None, "cpu", torch.device("cpu")) or dtype not in ("auto", "fp32", torch.float32):
        raise ReactClipError(
            f"{name!r} was asked for on {device} in {dtype}; exported towers compute in fp32 on the cpu"
        )
    way_out = "copy the whole folder, or export it again with `react-clip export MODEL --out DIR`"
    record = read_json(folder / RECORD, way_out)
    if not isinstance(record, dict) or record.get("schema") != SCHEMA or not record.keys() >= _FIELDS:
        raise ReactClipError(f"{folder / RECORD} is no record of an exported tower of schema {SCHEMA}; {way_out}")
    for file in _graph_files(record).values():
        if not (folder / file).is_file() or sha256_of(folder / file) != record["sha256"].get(file):
            raise ReactClipError(f"{folder / file} is missing or not the file that {RECORD} describes; {way_out}")
    return ExportedEncoder(GraphTower(folder, record, name))


def _graph_files(record: dict[str, Any]) -> dict[int, str]:
    """Files of the graphs that a record describes, by image size."""
    return {record["image_size"]: FULL} | ({record["small_size"]: SMALL} if record["small_size"] else {})


# ---------------------------------------------------------------------- exporting


def export(encoder: Encoder, folder: Path, photos: Tensor) -> float:
    """Write the image tower to a new folder, as :func:`react_clip.load` reads it; a failure leaves nothing behind.

    ``photos`` ``[B, 3, S, S]`` in [0, 1], and noisy views of them, go through the tower and through the graphs. Returns
    the largest difference in any number of any unit feature; one above :data:`TOLERANCE` is a failure.
    """
    if encoder.dtype != torch.float32 or encoder.device.type != "cpu" or isinstance(encoder, ExportedEncoder):
        what = f"{type(encoder).__name__} in {encoder.dtype} on {encoder.device}"
        raise ReactClipError(f"{encoder.name!r} is an {what}; export {encoder.weights!r}, loaded in fp32 on the cpu")
    check_new_folder(folder)
    encoder.check(photos)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as scratch:
            # A folder inside the private scratch folder, so that what is published has ordinary permissions.
            finished = Path(scratch) / "finished"
            finished.mkdir()
            record = _record(encoder)
            for size, file in _graph_files(record).items():
                _write_graph(encoder, finished / file, size)
            difference = largest_difference(encoder, GraphTower(finished, record, folder.name), photos)
            if not difference <= TOLERANCE:  # also of NaN
                raise ReactClipError(
                    f"the exported tower differs from {encoder.name!r} by {difference:.2g}, more than {TOLERANCE:g}; "
                    "nothing was written"
                )
            record["sha256"] = {file: sha256_of(finished / file) for file in _graph_files(record).values()}
            record |= {"largest_difference": difference, "versions": versions()}
            write_text(finished / RECORD, json.dumps(record, indent=1) + "\n")
            finished.rename(folder)
    except OSError as error:
        raise ReactClipError(f"cannot write {folder}: {error.strerror or error}; choose another --out") from error
    return difference


@torch.no_grad()
def largest_difference(encoder: Encoder, exported: GraphTower, photos: Tensor) -> float:
    """The largest difference between a tower and its graphs on photos, noisy views of them, and one photo alone."""
    sigma = torch.full((len(photos),), _NOISE)
    noisy = torch.cat([photos, noise.noisy_view(photos, noise.stream_keys(photos, 0), sigma)])
    differences = []
    for size in exported.graphs:
        views = smaller_copy(noisy, size)
        found = torch.cat([exported(views[:1]), exported(views[1:])])
        differences.append((found - encoder.encode(views)).abs().max())
    return float(torch.stack(differences).max())


class _PixelsToFeatures(nn.Module):
    """The part of an encoder that is exported: everything behind the range check."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, pixels: Tensor) -> Tensor:
        return functional.normalize(self.encoder.tower((pixels - self.encoder.mean) / self.encoder.std))


def _write_graph(encoder: Encoder, path: Path, size: int) -> None:
    for name in ("onnx", "onnxscript"):
        require(name, "exporting to ONNX", extra="export")
    # Two images as an example: a batch of one would be taken for a constant.
    example = torch.zeros(2, 3, size, size)
    shapes = {"pixels": {0: torch.export.Dim.DYNAMIC}}
    names: dict[str, Any] = {"input_names": ["pixels"], "output_names": ["features"], "dynamic_shapes": shapes}
    try:
        with load_quietly(), warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            module = _PixelsToFeatures(encoder).eval()
            torch.onnx.export(module, (example,), path, **names, dynamo=True, external_data=False, verbose=False)
    except Exception as error:  # exporters raise almost anything
        raise ReactClipError(
            f"{encoder.name!r} cannot be exported ({first_line(error)}); nothing was written"
        ) from error


def _record(encoder: Encoder) -> dict[str, Any]:
    sizes = {name: getattr(encoder, name) for name in ("image_size", "patch_size", "dim")}
    sizes["small_size"] = encoder.size_near(SMALL_FRACTION)
    how = {name: asdict(getattr(encoder, name)) for name in ("preprocessing", "similarity")}
    return {"schema": SCHEMA, "model": encoder.weights, "fingerprint": encoder.fingerprint(), **sizes, **how}
