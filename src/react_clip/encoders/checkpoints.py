"""Image towers from checkpoint files, such as the adversarially finetuned ones that papers publish.

``BASE+FILE`` is an encoder whose image tower comes from a file; a folder written by ``react-clip finetune`` names its
base itself. The file may have any of the usual layouts, containers and prefixes. Its tensors must be exactly those of
the image tower: a tower that is half loaded gives features and no error.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from react_clip.encoders.base import Encoder
from react_clip.errors import ReactClipError, first_line
from react_clip.storage import read_json, sha256_of

State = dict[str, Tensor]

TOWER, RECORD, SETTINGS = "tower.safetensors", "finetune.json", "settings.json"
"""Files of ``react-clip finetune``: the weights, the record of how they were made (written last), the settings."""

PROJECTION = "visual_projection.weight"
"""Hugging Face's name of OpenAI's ``proj``."""

_TORCH_SUFFIXES = (".pt", ".pth", ".bin")
_CONTAINERS = ("vision_encoder_state_dict", "model_state_dict", "state_dict", "model")
_OPENAI_ANCHOR, _HF_ANCHOR = "conv1.weight", "embeddings.patch_embedding.weight"
_HF_TOWER = "vision_model."
# Entries of checkpoints that do not belong to the image tower.
_IGNORED = re.compile(
    r"(.*\.)?position_ids|logit_scale|logit_bias|(text|text_model|text_projection|token_embedding|ln_final)(\..*)?"
    r"|input_resolution|context_length|vocab_size"
)


# ---------------------------------------------------------------------- names


def split_name(name: str) -> tuple[str, Path] | None:
    """Base and checkpoint of a name; ``None`` for the name of a plain model.

    ``BASE+FILE`` counts where FILE exists (a folder of ``react-clip finetune`` is its tower), so that a plus sign in a
    path stays what it is.
    """
    folder = Path(name)
    if folder.is_dir():
        if (folder / RECORD).is_file():
            return _read_finetuned(folder)
        if (folder / SETTINGS).is_file() and not (folder / "config.json").is_file():
            raise ReactClipError(
                f"{folder} is a finetuning run that has not finished; give the same `react-clip finetune` command again"
            )
        return None
    for plus in (match.start() for match in re.finditer(r"\+", name)):
        base, file = name[:plus], Path(name[plus + 1 :]).expanduser()
        if base and file.is_file():
            return base, file
        if base and (file / RECORD).is_file():
            return base, _read_finetuned(file)[1]
    return None


def lasting_name(name: str) -> str:
    """The name with its paths made absolute, so that a record means the same from any working directory."""
    if Path(name).is_dir():
        return str(Path(name).resolve())
    parts = split_name(name)
    return name if parts is None else f"{lasting_name(parts[0])}+{parts[1].resolve()}"


def _read_finetuned(folder: Path) -> tuple[str, Path]:
    """Base and tower of a folder of ``react-clip finetune``; the tower must be the one that was recorded."""
    way_out = "finetune again, or load FOLDER/tower.safetensors as BASE+FILE"
    record = read_json(folder / RECORD, way_out)
    if not isinstance(record, dict) or not all(isinstance(record.get(key), str) for key in ("model", "sha256")):
        raise ReactClipError(f"{folder / RECORD} does not name a model and the sha256 of its tower; {way_out}")
    if Path(record["model"]).resolve() == folder.resolve():
        raise ReactClipError(f"{folder / RECORD} names its own folder as the base model; correct it")
    tower, expected = folder / TOWER, record["sha256"]
    if not tower.is_file():
        raise ReactClipError(f"{folder} has no {TOWER}; copy the whole folder, or finetune again")
    if (digest := sha256_of(tower)) != expected:
        raise ReactClipError(
            f"{tower} has sha256 {digest[:12]}..., {RECORD} says {expected[:12]}...; the file is damaged or another "
            "one: copy it again, or finetune again"
        )
    return record["model"], tower


# ---------------------------------------------------------------------- towers of encoders


def image_parameters(encoder: Encoder) -> dict[str, nn.Parameter]:
    """The parameters of the image tower: a CLIP vision transformer's by OpenAI's names, others' by their library's."""
    parameters = {key.removeprefix("visual."): value for key, value in encoder.tower.named_parameters()}
    if not parameters:
        raise ReactClipError(f"{encoder.name!r} has no weights in PyTorch; load {encoder.weights!r}, its source")
    return parameters


def image_tower(encoder: Encoder) -> State:
    """The image tower's tensors, without gradients: a CLIP vision transformer's in OpenAI's layout."""
    image_parameters(encoder)
    return {key.removeprefix("visual."): tensor.detach() for key, tensor in encoder.tower.state_dict().items()}


def load_tower(encoder: Encoder, path: Path) -> None:
    """Replace the image tower of an encoder by the one in a file."""
    stored, own = find_tower(read_tensors(path), path), image_tower(encoder)
    stored.check(to_hf(own) if stored.hf else own, encoder.name)
    state = to_openai(stored.state) if stored.hf and _OPENAI_ANCHOR in own else stored.state
    with torch.no_grad():
        for key, tensor in own.items():
            tensor.copy_(state[key])


# ---------------------------------------------------------------------- files


@dataclass(frozen=True, eq=False)
class StoredTower:
    """An image tower in a file: OpenAI keys without prefix, or Hugging Face's from ``vision_model.`` on."""

    path: Path
    hf: bool
    state: State
    names: dict[str, str]
    """The name in the file of each key."""

    def check(self, expected: Mapping[str, Tensor], model: str) -> None:
        """Raise on any difference from the tower that is to be replaced."""
        prefix = self.prefix()
        if missing := [prefix + key for key in expected if key not in self.state]:
            self._refuse(model, f"lacks {_count(missing)} of the image tower")
        if unexpected := [self.names[key] for key in self.state if key not in expected]:
            self._refuse(model, f"holds {_count(unexpected)} that the image tower does not have")
        if reshaped := [key for key in expected if self.state[key].shape != expected[key].shape]:
            shapes = f"{list(self.state[reshaped[0]].shape)} instead of {list(expected[reshaped[0]].shape)}"
            self._refuse(model, f"holds {_count([self.names[key] for key in reshaped])} in another shape, {shapes}")
        if bad := [name for key, name in self.names.items() if not _is_sound(self.state[key])]:
            self._refuse(model, f"holds {_count(bad)} with other than finite floating-point numbers")

    def prefix(self) -> str:
        """Prefix of the keys in the file."""
        anchor = _HF_TOWER + _HF_ANCHOR if self.hf else _OPENAI_ANCHOR
        return self.names[anchor].removesuffix(anchor) if self.names[anchor].endswith(anchor) else ""

    def _refuse(self, model: str, what: str) -> None:
        raise ReactClipError(f"{self.path} does not fit {model!r}: it {what}; give the base model it was made from")


def _count(keys: list[str]) -> str:
    return f"{len(keys)} tensor{'s' if len(keys) > 1 else ''} ({keys[0]}{' first' if len(keys) > 1 else ''})"


def _is_sound(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and bool(torch.isfinite(tensor).all())


def find_tower(tensors: Mapping[str, Tensor], path: Path) -> StoredTower:
    """The image tower among a checkpoint's tensors, recognised by its first convolution under any prefix."""
    openai, hf = _prefixes(tensors, _OPENAI_ANCHOR), _prefixes(tensors, _HF_ANCHOR)
    if len(openai) + len(hf) != 1:
        what = f"{len(openai) + len(hf)} image towers ({', '.join(map(repr, [*openai, *hf]))})" if openai or hf else ""
        raise ReactClipError(
            f"{path} holds {what or 'no CLIP image tower'}; give a file with one tower in OpenAI's layout "
            f"(visual.{_OPENAI_ANCHOR}, ...) or Hugging Face's ({_HF_TOWER}{_HF_ANCHOR}, ...)"
        )
    prefix = (openai or hf)[0]
    # Hugging Face keeps the projection beside the tower; OpenAI keeps it inside.
    names = {key.removeprefix(prefix): key for key in tensors if key.startswith(prefix)}
    names = {key: name for key, name in names.items() if not _IGNORED.fullmatch(key)}
    if hf:
        projections = [name for name in tensors if name.endswith(PROJECTION)]
        beside = prefix.removesuffix(_HF_TOWER) + PROJECTION
        names = {_HF_TOWER + key: name for key, name in names.items() if name not in projections}
        if chosen := [name for name in projections if name == beside] or projections[:1]:
            names[PROJECTION] = chosen[0]
    return StoredTower(path, bool(hf), {key: tensors[name] for key, name in names.items()}, names)


def _prefixes(keys: Iterable[str], anchor: str) -> list[str]:
    """Prefixes of the anchor's key, without those inside another one: a ResNet has such convolutions everywhere."""
    prefixes = [key.removesuffix(anchor) for key in keys if key == anchor or key.endswith(f".{anchor}")]
    return [one for one in prefixes if not any(one != other and one.startswith(other) for other in prefixes)]


def read_tensors(path: Path) -> State:
    """The tensors of a checkpoint file, from the usual nested dictionaries; nothing in the file is executed."""
    if path.suffix != ".safetensors" and path.suffix not in _TORCH_SUFFIXES:
        raise ReactClipError(
            f"{path} ends in {path.suffix!r}; a checkpoint is a .safetensors, {', '.join(_TORCH_SUFFIXES)} file"
        )
    try:
        content: Any = load_file(path) if path.suffix == ".safetensors" else _read_torch(path)
    except (OSError, SafetensorError, RuntimeError, EOFError, KeyError, ValueError) as error:
        raise ReactClipError(f"{path} cannot be read ({first_line(error)}); get the file again") from None
    while isinstance(content, Mapping):
        inner = next((content[key] for key in _CONTAINERS if isinstance(content.get(key), Mapping)), None)
        if inner is None:
            break
        content = inner
    if not isinstance(content, Mapping):
        raise ReactClipError(f"{path} holds a {type(content).__name__}; a checkpoint is a dictionary of tensors")
    return {str(key): value for key, value in content.items() if isinstance(value, Tensor)}


def _read_torch(path: Path) -> Any:
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if any(name.endswith("/constants.pkl") for name in archive.namelist()):
                raise ReactClipError(
                    f"{path} is a TorchScript program, as OpenAI publishes; save its state_dict() as safetensors where "
                    "you trust it, or load the same model by its hub id"
                )
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        blocked = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"it needs {blocked[1]}" if blocked else first_line(error)
        raise ReactClipError(
            f"{path} holds more than tensors ({what}), which could run code; save its state_dict as safetensors where "
            "you trust it"
        ) from None


# ---------------------------------------------------------------------- key layouts
#
# OpenAI's layout (open_clip's too) and Hugging Face's differ in names, in the query, key and value matrices (one block
# in OpenAI's, three in Hugging Face's) and in the projection, which is stored transposed. Keys of OpenAI's layout are
# written without the ``visual.`` prefix here.

_NAMES = (
    ("class_embedding", "vision_model.embeddings.class_embedding"),
    ("positional_embedding", "vision_model.embeddings.position_embedding.weight"),
    ("conv1.", "vision_model.embeddings.patch_embedding."),
    ("ln_pre.", "vision_model.pre_layrnorm."),
    ("ln_post.", "vision_model.post_layernorm."),
    ("transformer.resblocks.", "vision_model.encoder.layers."),
    (".attn.out_proj.", ".self_attn.out_proj."),
    (".ln_1.", ".layer_norm1."),
    (".ln_2.", ".layer_norm2."),
    (".mlp.c_fc.", ".mlp.fc1."),
    (".mlp.c_proj.", ".mlp.fc2."),
)
"""Parts of keys in OpenAI's layout and in Hugging Face's."""
_MERGED = re.compile(r"(.+)\.attn\.in_proj_(weight|bias)")
_SPLIT = re.compile(r"(.+)\.self_attn\.([qkv])_proj\.(weight|bias)")


def to_hf(state: Mapping[str, Tensor]) -> State:
    """From OpenAI's keys to Hugging Face's; a key that no CLIP vision transformer has stays as it is.

    >>> sorted(to_hf({"proj": torch.zeros(4, 2), "transformer.resblocks.0.attn.in_proj_bias": torch.zeros(6)}))[:2]
    ['vision_model.encoder.layers.0.self_attn.k_proj.bias', 'vision_model.encoder.layers.0.self_attn.q_proj.bias']
    """
    renamed: State = {}
    for key, tensor in state.items():
        if key == "proj":
            renamed[PROJECTION] = tensor.T
        elif merged := _MERGED.fullmatch(key):
            for letter, part in zip("qkv", tensor.chunk(3), strict=True):
                renamed[_hf_name(f"{merged[1]}.self_attn.{letter}_proj.{merged[2]}")] = part
        else:
            renamed[_hf_name(key)] = tensor
    return renamed


def to_openai(state: Mapping[str, Tensor]) -> State:
    """From Hugging Face's keys to OpenAI's; the inverse of :func:`to_hf`.

    >>> state = {"conv1.weight": torch.rand(1, 3, 2, 2), "proj": torch.rand(4, 2)}
    >>> to_openai(to_hf(state)).keys() == state.keys()
    True
    """
    renamed: State = {}
    for key, tensor in state.items():
        if key == PROJECTION:
            renamed["proj"] = tensor.T
        elif split := _SPLIT.fullmatch(key):
            block, letter, kind = split.groups()
            if letter == "q":
                parts = [state[f"{block}.self_attn.{each}_proj.{kind}"] for each in "qkv"]
                renamed[_openai_name(f"{block}.attn.in_proj_{kind}")] = torch.cat(parts)
        else:
            renamed[_openai_name(key)] = tensor
    return renamed


def _hf_name(key: str) -> str:
    for openai, hf in _NAMES:
        key = key.replace(openai, hf)
    return key


def _openai_name(key: str) -> str:
    for openai, hf in _NAMES:
        key = key.replace(hf, openai)
    return key
