"""Make the label table that ships in the package: mean image features of labelled photos, plain names, groups.

    python tools/make_label_table.py data/ --heads heads/ --photo-features photos.safetensors
    python tools/make_label_table.py data/ --heads heads/ --measure benchmarks/results/label-table.json

DATA_DIR holds ``<set>/train/<class>/*`` (and ``<set>/test`` for --measure). HEADS_DIR holds ``<set>.npz`` files, of
which only the class names enter the table; their text features serve as a comparison in --measure and nowhere else.
Names and groups are in ``label_groups.toml``. Encoding is the long part; with --photo-features it is kept, so that a
change of names or groups takes seconds.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from react_clip import encoders, functional
from react_clip.environment import typed_command, versions
from react_clip.errors import ReactClipError
from react_clip.label_table import TABLE_FILE, TENSOR, LabelTable, match_key
from react_clip.storage import atomic_path, write_text

NAMES = tomllib.loads(Path(__file__).with_name("label_groups.toml").read_text(encoding="utf-8"))
"""Plain names, groups and default sets."""
ENCODER, IMAGENET, BATCH = "clip-vit-b-16", "imagenet", 32
PREPROCESSING = "1: RGB, shorter side 256 bilinear, centre crop 224"

Entries = dict[str, dict[str, str]]
"""Set to its class folders, in order, and their plain names."""


@dataclass(frozen=True)
class Photo:
    """One labelled photo: ``<set>/<split>/<folder>/<file>`` under the data directory."""

    set: str
    folder: str
    file: Path


def photos_of(data: Path, split: str) -> list[Photo]:
    """Every photo of a split, in a fixed order."""
    files = sorted(file for file in data.glob(f"*/{split}/*/*") if file.is_file() and not file.name.startswith("."))
    if not files:
        raise ReactClipError(f"{data} has no <set>/{split}/<class>/<photo>; give the folder that holds the sets")
    return [Photo(file.parts[-4], file.parts[-2], file) for file in files]


def encode(photos: list[Photo], data: Path, kept: Path | None, dtype: str) -> Tensor:
    """Unit features ``[N, D]`` of photos; those in the file ``kept`` are taken from there, the others are added."""
    about = {"dtype": dtype, "preprocessing": PREPROCESSING}
    known: dict[str, Tensor] = {}
    if kept and kept.is_file():
        with safe_open(kept, framework="pt") as stored:
            found = stored.metadata()
            if {key: found[key] for key in about} != about:
                raise ReactClipError(f"{kept} holds features of {found['dtype']}, {found['preprocessing']}")
            known = dict(zip(json.loads(found["paths"]), stored.get_tensor(TENSOR), strict=True))
    files = {photo.file.relative_to(data).as_posix(): photo.file for photo in photos}
    missing = [key for key in files if key not in known]
    if missing:
        encoder = encoders.load(ENCODER, dtype=dtype)
        for start in tqdm(range(0, len(missing), BATCH), unit="batch", desc="encoding"):
            keys = missing[start : start + BATCH]
            with torch.no_grad():
                known |= zip(keys, encoder(encoder.prepare([files[key] for key in keys])).cpu(), strict=True)
        if kept:
            with atomic_path(kept) as temporary:
                paths = {"paths": json.dumps(list(known))}
                save_file({TENSOR: torch.stack(list(known.values()))}, temporary, metadata=about | paths)
    return torch.stack([known[key] for key in files])


# ---------------------------------------------------------------------- names and groups


def entries_of(photos: list[Photo], heads: Path | None) -> Entries:
    """Plain names, in lower case: our own word for a class folder, else the head's, else the folder's, cleaned."""
    entries: Entries = defaultdict(dict)
    heads_of = {name: _head(heads, name) for name in {photo.set for photo in photos}}
    for photo in photos:
        if photo.folder in entries[photo.set]:
            continue
        names, _ = heads_of[photo.set]
        # "083.hibiscus" -> "hibiscus", "apple_pie" -> "apple pie"
        name = names.get(photo.folder, re.sub(r"^\d+\.", "", photo.folder)).replace("_", " ").strip().lower()
        name = NAMES["by_name"].get(photo.set, {}).get(name, name)
        name = NAMES["by_folder"].get(photo.set, {}).get(photo.folder, name)
        if re.fullmatch(r"n\d{8}", name):
            raise ReactClipError(f"{photo.set}/{photo.folder} is a WordNet id without a plain name; give --heads")
        entries[photo.set][photo.folder] = name
    names_of_imagenet = list(entries[IMAGENET].values())
    if twice := sorted({name for name in names_of_imagenet if names_of_imagenet.count(name) > 1}):
        raise ReactClipError(f"two ImageNet classes are called {twice[0]!r}; tell them apart in label_groups.toml")
    return entries


def _head(heads: Path | None, set_name: str) -> tuple[dict[str, str], Tensor | None]:
    """Names by class folder and text features of a set's head; empty where there is none."""
    if heads is None or not (file := heads / f"{set_name}.npz").is_file():
        return {}, None
    with np.load(file, allow_pickle=False) as head:
        names = dict(zip(head["folders"].tolist(), head["names"].tolist(), strict=True))
        return names, torch.from_numpy(head["features"])


def resolve_groups(entries: Entries) -> dict[str, tuple[str, ...]]:
    """Write the groups out as member names; refuse members that do not exist and spellings that clash."""
    existing = {name for of_set in entries.values() for name in of_set.values()}
    imagenet = list(entries[IMAGENET].values())

    def members(group: str) -> list[str]:
        found: list[str] = []
        for token in NAMES["groups"][group].split(", "):
            if token.startswith("@"):
                found += members(token[1:])
            elif token.endswith(":*"):
                found += entries[token[:-2]].values()
            elif span := re.fullmatch(r"(\d+)(?:-(\d+))?", token):
                found += imagenet[int(span[1]) : int(span[2] or span[1]) + 1]
            elif token in existing:
                found.append(token)
            else:
                raise ReactClipError(f"group {group!r} has a member {token!r} that no photo is labelled with")
        return found

    groups = {group: tuple(dict.fromkeys(members(group))) for group in NAMES["groups"]}
    spellings: dict[str, str] = {}
    for label in sorted(existing | set(groups)):
        if (other := spellings.setdefault(match_key(label), label)) != label:
            raise ReactClipError(f"{label!r} and {other!r} are spelled alike; rename one")
        if label in existing and label in groups and label not in groups[label]:
            raise ReactClipError(f"group {label!r} leaves out the entry of that name; add it or rename one")
    if general := sorted(set(imagenet) & set(groups)):
        raise ReactClipError(f"{general[0]!r} is an ImageNet class and a group; as a label it would mean the group")
    return groups


def make(data: Path, heads: Path | None, out: Path, kept: Path | None, dtype: str) -> LabelTable:
    """Encode the train photos and write the table."""
    photos = photos_of(data, "train")
    entries = entries_of(photos, heads)
    groups = resolve_groups(entries)
    of_entry: dict[str, list[Tensor]] = defaultdict(list)
    for photo, feature in zip(photos, encode(photos, data, kept, dtype), strict=True):
        of_entry[entries[photo.set][photo.folder]].append(feature)
    names = sorted(of_entry)
    offered = dict.fromkeys(name for of_set in NAMES["default_sets"] for name in entries.get(of_set, {}).values())
    said = {
        "encoder": ENCODER,
        "names": names,
        "groups": groups,
        "vocabulary": [name for name in offered if name not in groups and name not in NAMES["not_default"]],
        "photos": [len(of_entry[name]) for name in names],
        "sets": {set_name: list(of_set.values()) for set_name, of_set in entries.items()},
        "preprocessing": PREPROCESSING,
    }
    about = {key: json.dumps(value, ensure_ascii=False, separators=(",", ":")) for key, value in said.items()}
    matrix = torch.stack([functional.normalize(torch.stack(of_entry[name]).mean(0)) for name in names])
    with atomic_path(out) as temporary:
        save_file({TENSOR: matrix.half()}, temporary, metadata=about)
    return LabelTable.load(out)


# ---------------------------------------------------------------------- accuracy on the test photos


def measure(table: LabelTable, data: Path, heads: Path | None, kept: Path | None, dtype: str) -> dict[str, object]:
    """Accuracy of the table on the test photos, with the command, versions and device."""
    photos = photos_of(data, "test")
    entries = entries_of(photos, heads)
    features = encode(photos, data, kept, dtype)
    truth = np.array([entries[photo.set][photo.folder] for photo in photos])
    of_set = np.array([photo.set for photo in photos])

    def score(
        rows: np.ndarray, candidates: Sequence[str], k: int = 1, features_of: Callable[..., Tensor] = table.features
    ) -> dict[str, float]:
        own = rows & np.isin(truth, candidates)
        return accuracy(features[torch.from_numpy(own)], truth[own], candidates, features_of(candidates), k)

    vocabulary, imagenet = table.vocabulary(), of_set == IMAGENET
    own_classes = {name: tuple(dict.fromkeys(table.sets[name])) for name in dict.fromkeys(of_set.tolist())}
    numbers: dict[str, object] = {
        "command": typed_command() or " ".join(["python", *sys.argv]),
        "versions": versions(),
        "device": f"{encoders.loading.resolve_device(None)}, {dtype}",
        "table": {"encoder": ENCODER, "names": len(table.names), "groups": len(table.groups)},
        "imagenet_top1": score(imagenet, own_classes[IMAGENET]),
        "imagenet_top5": score(imagenet, own_classes[IMAGENET], 5),
        "imagenet_top1_whole_vocabulary": score(imagenet, vocabulary),
        "own_classes_top1": {name: score(of_set == name, own) for name, own in own_classes.items()},
        "whole_vocabulary_top1": {
            name: score(of_set == name, vocabulary) for name, own in own_classes.items() if {*own} & {*vocabulary}
        },
    }
    checked = NAMES["checked_groups"]
    group_of = {member: group for group in checked for member in table.groups[group]}
    rows = imagenet & np.isin(truth, list(group_of))
    asked = np.array([group_of[entry] for entry in truth[rows]])
    numbers["groups"] = {
        "choices": len(checked),
        "all": accuracy(features[torch.from_numpy(rows)], asked, checked, table.features(checked), 1),
    }
    names, text = _head(heads, IMAGENET)
    if text is not None:
        order = [entries[IMAGENET][folder] for folder in names]
        for k in (1, 5):
            numbers[f"imagenet_text_head_top{k}"] = score(imagenet, order, k, lambda _: text)
    return numbers


def accuracy(features: Tensor, truth: np.ndarray, candidates: Sequence[str], of: Tensor, k: int) -> dict[str, float]:
    """Fraction of photos whose entry is among the ``k`` nearest candidates, in per cent with its standard error."""
    nearest = np.array(candidates)[(features @ of.T).topk(k).indices.numpy()]
    right = float((nearest == truth[:, None]).any(1).mean())
    error = (right * (1 - right) / len(truth)) ** 0.5
    return {"percent": round(100 * right, 2), "standard_error": round(100 * error, 2), "photos": len(truth)}


def main() -> int:
    """Run the tool."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, metavar="DATA_DIR")
    parser.add_argument("--heads", type=Path, metavar="HEADS_DIR", help="class names, as <set>.npz")
    parser.add_argument("--out", type=Path, default=TABLE_FILE, help="the table (default: the one in the package)")
    parser.add_argument("--photo-features", type=Path, metavar="FILE", help="keep the features of single photos here")
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"), help="the shipped table is fp32")
    parser.add_argument("--measure", type=Path, metavar="FILE", help="also score the test photos; results as JSON")
    asked = parser.parse_args()
    try:
        table = make(asked.data, asked.heads, asked.out, asked.photo_features, asked.dtype)
        print(f"{asked.out}: {table}, {asked.out.stat().st_size:,} bytes, vocabulary of {len(table.vocabulary())}")
        if asked.measure:
            numbers = measure(table, asked.data, asked.heads, asked.photo_features, asked.dtype)
            write_text(asked.measure, json.dumps(numbers, indent=1) + "\n")
    except ReactClipError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
