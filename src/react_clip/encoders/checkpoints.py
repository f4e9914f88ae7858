"""Image towers from checkpoint files, such as the adversarially finetuned ones that papers publish.

``BASE+FILE`` is an encoder whose image tower comes from a file; a folder written by ``react-clip finetune`` names its
base itself. The file may have any of the usual layouts, containers and prefixes. Its tensors must be exactly those of
the image tower: a tower that is half loaded gives features and no error.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Mapping
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
    tower = folder / TOWER
    if not tower.is_file() or sha256_of(tower) != record["sha256"]:
        raise ReactClipError(f"{tower} is missing or not the file that {RECORD} describes; copy the whole folder again")
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
    own, stored = image_tower(encoder), find_tower(read_tensors(path), path)
    state = to_openai(stored) if _OPENAI_ANCHOR in own else stored
    needed, found = ({key: list(tensor.shape) for key, tensor in each.items()} for each in (own, state))
    if wrong := [key for key in needed | found if needed.get(key) != found.get(key)]:
        raise ReactClipError(
            f"{path} does not fit {encoder.name!r}: {len(wrong)} tensors differ, such as {wrong[0]}, whose shape is "
            f"{found.get(wrong[0])} instead of {needed.get(wrong[0])}; give the base model it was made from"
        )
    if bad := [key for key, tensor in state.items() if not (tensor.is_floating_point() and tensor.isfinite().all())]:
        raise ReactClipError(f"{path} holds {bad[0]} with other than finite floating-point numbers; get it again")
    with torch.no_grad():
        for key, tensor in own.items():
            tensor.copy_(state[key])


# ---------------------------------------------------------------------- files


def find_tower(tensors: Mapping[str, Tensor], path: Path) -> State:
    """The image tower among a checkpoint's tensors, recognised by its first convolution under any prefix.

    Keys are OpenAI's without prefix, or Hugging Face's from ``vision_model.`` on.
    """
    openai, hf = _prefixes(tensors, _OPENAI_ANCHOR), _prefixes(tensors, _HF_ANCHOR)
    if len(openai) + len(hf) != 1:
        what = f"{len(openai) + len(hf)} image towers ({', '.join(map(repr, [*openai, *hf]))})" if openai or hf else ""
        raise ReactClipError(
            f"{path} holds {what or 'no CLIP image tower'}; give a file with one tower in OpenAI's layout "
            f"(visual.{_OPENAI_ANCHOR}, ...) or Hugging Face's ({_HF_TOWER}{_HF_ANCHOR}, ...)"
        )
    prefix = (openai or hf)[0]
    state = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
    state = {key: tensor for key, tensor in state.items() if not _IGNORED.fullmatch(key)}
    if hf:
        # Hugging Face keeps the projection beside the tower; OpenAI keeps it inside.
        state = {_HF_TOWER + key: tensor for key, tensor in state.items() if not key.endswith(PROJECTION)}
        if projections := [key for key in tensors if key.endswith(PROJECTION)]:
            beside = prefix.removesuffix(_HF_TOWER) + PROJECTION
            state[PROJECTION] = tensors[beside if beside in projections else projections[0]]
    return state


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
        if path.suffix == ".safetensors":
            content: Any = load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        blocked = re.search(r"GLOBAL ([\w.]+)", str(error))
        raise ReactClipError(
            f"{path} holds more than tensors ({blocked[1] if blocked else first_line(error)}), which could run code; "
            "save its state_dict as safetensors where you trust it"
        ) from None
    except (OSError, SafetensorError, RuntimeError, EOFError, KeyError, ValueError) as error:
        raise ReactClipError(f"{path} cannot be read ({first_line(error)}); get the file again") from None
    while isinstance(content, Mapping) and any(isinstance(content.get(key), Mapping) for key in _CONTAINERS):
        content = next(content[key] for key in _CONTAINERS if isinstance(content.get(key), Mapping))
    if isinstance(content, Tensor):
        return {"tensor": content}
    if not isinstance(content, Mapping):
        raise ReactClipError(f"{path} holds a {type(content).__name__}; a checkpoint is a dictionary of tensors")
    return {str(key): value for key, value in content.items() if isinstance(value, Tensor)}


# ---------------------------------------------------------------------- key layouts

_NAMES = (
    ("positional_embedding", "vision_model.embeddings.position_embedding.weight"),
    ("conv1.", "vision_model.embeddings.patch_embedding."),
    ("", "vision_model.embeddings."),
    ("ln_pre.", "vision_model.pre_layrnorm."),
    ("ln_post.", "vision_model.post_layernorm."),
    ("transformer.resblocks.", "vision_model.encoder.layers."),
    (".attn.out_proj.", ".self_attn.out_proj."),
    (".ln_1.", ".layer_norm1."),
    (".ln_2.", ".layer_norm2."),
    (".mlp.c_fc.", ".mlp.fc1."),
    (".mlp.c_proj.", ".mlp.fc2."),
)
"""Parts of keys in OpenAI's layout, which open_clip has too, without ``visual.``, and in Hugging Face's."""


def to_openai(state: Mapping[str, Tensor]) -> State:
    """From Hugging Face's keys to OpenAI's; other keys stay as they are.

    OpenAI has one matrix for queries, keys and values, and stores the projection transposed.

    >>> projections = {f"vision_model.encoder.layers.0.self_attn.{each}_proj.bias": torch.zeros(2) for each in "qkv"}
    >>> {key: list(value.shape) for key, value in to_openai(projections).items()}
    {'transformer.resblocks.0.attn.in_proj_bias': [6]}
    """
    renamed = {_openai_name(key): tensor for key, tensor in state.items()}
    for queries in [key for key in renamed if ".self_attn.q_proj." in key]:
        three = [queries.replace(".q_proj.", f".{letter}_proj.") for letter in "qkv"]
        if set(three) <= renamed.keys():
            joint = queries.replace(".self_attn.q_proj.", ".attn.in_proj_")
            renamed[joint] = torch.cat([renamed.pop(key) for key in three])
    if PROJECTION in renamed:
        renamed["proj"] = renamed.pop(PROJECTION).T
    return renamed


def _openai_name(key: str) -> str:
    for openai, hf in _NAMES:
        key = key.replace(hf, openai)
    return key
