"""Make the label bank that ships in the package: mean image features of labelled photos, plain names, groups.

    python tools/make_label_bank.py data/ --heads heads/ --photo-features photos.safetensors
    python tools/make_label_bank.py data/ --heads heads/ --photo-features photos.safetensors \
        --measure benchmarks/results/label-bank.json

DATA_DIR holds ``<set>/train/<class>/*`` (and ``<set>/test`` for --measure). HEADS_DIR holds ``<set>.npz`` files, of
which only the class names enter the bank; their text features serve as a comparison in --measure and nowhere else.
Encoding is the long part; with --photo-features it is kept, so that a change of names or groups takes seconds.
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
from react_clip.bank import BANK_FILE, TENSOR, LabelBank, match_key
from react_clip.environment import versions
from react_clip.errors import ReactClipError
from react_clip.preprocess import as_pixels
from react_clip.storage import atomic_path, write_text

NAMES = tomllib.loads(Path(__file__).with_name("label_groups.toml").read_text(encoding="utf-8"))
"""Plain names, groups and default sets."""
ENCODER = "clip-vit-b-16"
BATCH = 32
PREPROCESSING = "1: RGB, shorter side 256 bilinear, centre crop 224"
IMAGENET = "imagenet"


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
    """Unit features of photos; those in ``kept`` are taken from there, the others are added to it."""
    known = _read_kept(kept, dtype)
    keys = [photo.file.relative_to(data).as_posix() for photo in photos]
    missing = [index for index, key in enumerate(keys) if key not in known]
    if missing:
        encoder = encoders.load(ENCODER, dtype=dtype)
        with tqdm(total=len(missing), unit="photo", desc="encoding") as bar, torch.no_grad():
            for start in range(0, len(missing), BATCH):
                batch = missing[start : start + BATCH]
                pixels = as_pixels([photos[index].file for index in batch], encoder.image_size)
                for index, feature in zip(batch, encoder(pixels).cpu(), strict=True):
                    known[keys[index]] = feature
                bar.update(len(batch))
        if kept:
            with atomic_path(kept) as temporary:
                about = {"paths": json.dumps(list(known)), "dtype": dtype, "preprocessing": PREPROCESSING}
                save_file({TENSOR: torch.stack(list(known.values()))}, temporary, metadata=about)
    return torch.stack([known[key] for key in keys])


def _read_kept(kept: Path | None, dtype: str) -> dict[str, Tensor]:
    if kept is None or not kept.is_file():
        return {}
    with safe_open(kept, framework="pt") as stored:
        about = stored.metadata()
        if (about["dtype"], about["preprocessing"]) != (dtype, PREPROCESSING):
            raise ReactClipError(
                f"{kept} holds {about['dtype']} features, {about['preprocessing']}; choose another file"
            )
        return dict(zip(json.loads(about["paths"]), stored.get_tensor(TENSOR), strict=True))


def plain_names(set_name: str, folders: list[str], heads: Path | None) -> dict[str, str]:
    """Class folder to plain name: our own word, else the head's, else the folder's, cleaned; all in lower case."""
    given: dict[str, str] = {}
    if heads and (file := heads / f"{set_name}.npz").is_file():
        with np.load(file, allow_pickle=False) as head:
            given = dict(zip(head["folders"].tolist(), head["names"].tolist(), strict=True))
    names = {}
    for folder in folders:
        # "083.hibiscus" -> "hibiscus", "apple_pie" -> "apple pie"
        name = given.get(folder, re.sub(r"^\d+\.", "", folder)).replace("_", " ").strip().lower()
        name = NAMES["by_folder"].get(set_name, {}).get(folder, NAMES["by_name"].get(set_name, {}).get(name, name))
        if re.fullmatch(r"n\d{8}", name):
            raise ReactClipError(f"{set_name}/{folder} is a WordNet id without a plain name; give --heads")
        names[folder] = name
    return names


def entries_of(photos: list[Photo], heads: Path | None) -> dict[str, dict[str, str]]:
    """Set to its class folders (in order) and their entries; the 1000 ImageNet classes must stay 1000 entries."""
    folders: dict[str, list[str]] = defaultdict(list)
    for photo in photos:
        if photo.folder not in folders[photo.set]:
            folders[photo.set].append(photo.folder)
    entries = {set_name: plain_names(set_name, found, heads) for set_name, found in folders.items()}
    twice = sorted(n for n in entries[IMAGENET].values() if list(entries[IMAGENET].values()).count(n) > 1)
    if twice:
        raise ReactClipError(f"two ImageNet classes are called {twice[0]!r}; tell them apart in label_groups.toml")
    return entries


def resolve_groups(entries: dict[str, dict[str, str]]) -> dict[str, tuple[str, ...]]:
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
    return groups


def default_names(entries: dict[str, dict[str, str]], groups: dict[str, tuple[str, ...]]) -> list[str]:
    """The vocabulary: entries of the chosen sets; those that name a group ("chair") are too general for it."""
    if general := sorted(set(entries[IMAGENET].values()) & set(groups)):
        raise ReactClipError(f"{general[0]!r} is an ImageNet class and a group; as a label it would mean the group")
    names = dict.fromkeys(name for set_name in NAMES["default_sets"] for name in entries.get(set_name, {}).values())
    return [name for name in names if name not in groups and name not in NAMES["not_default"]]


def make(data: Path, heads: Path | None, out: Path, kept: Path | None, dtype: str) -> LabelBank:
    """Encode the train photos and write the bank."""
    photos = photos_of(data, "train")
    entries = entries_of(photos, heads)
    groups = resolve_groups(entries)
    features = encode(photos, data, kept, dtype)
    of_entry: dict[str, list[Tensor]] = defaultdict(list)
    for photo, feature in zip(photos, features, strict=True):
        of_entry[entries[photo.set][photo.folder]].append(feature)
    names = sorted(of_entry)
    matrix = torch.stack([functional.normalize(torch.stack(of_entry[name]).mean(0)) for name in names])
    said = {
        "encoder": ENCODER,
        "names": names,
        "groups": groups,
        "vocabulary": default_names(entries, groups),
        "photos": [len(of_entry[name]) for name in names],
        "sets": {set_name: list(of_set.values()) for set_name, of_set in entries.items()},
        "preprocessing": PREPROCESSING,
    }
    about = {key: json.dumps(value, ensure_ascii=False, separators=(",", ":")) for key, value in said.items()}
    with atomic_path(out) as temporary:
        save_file({TENSOR: matrix.half()}, temporary, metadata=about)
    return LabelBank.load(out)


def measure(bank: LabelBank, data: Path, heads: Path | None, kept: Path | None, dtype: str) -> dict[str, object]:
    """Accuracy of the bank on the test photos."""
    photos = photos_of(data, "test")
    entries = entries_of(photos, heads)
    features = encode(photos, data, kept, dtype)
    truth = [entries[photo.set][photo.folder] for photo in photos]
    rows: dict[str, list[int]] = defaultdict(list)
    for row, photo in enumerate(photos):
        rows[photo.set].append(row)

    def score(set_name: str, candidates: Sequence[str], k: int = 1) -> dict[str, float]:
        own = [row for row in rows[set_name] if truth[row] in candidates]
        return accuracy(features[own], [truth[row] for row in own], candidates, bank.features, k)

    imagenet = bank.sets[IMAGENET]
    numbers: dict[str, object] = {
        "imagenet_top1": score(IMAGENET, imagenet),
        "imagenet_top5": score(IMAGENET, imagenet, 5),
        "imagenet_top1_whole_vocabulary": score(IMAGENET, bank.vocabulary()),
        "own_classes_top1": {name: score(name, tuple(dict.fromkeys(bank.sets[name]))) for name in rows},
        "whole_vocabulary_top1": {
            name: score(name, bank.vocabulary()) for name in rows if set(bank.sets[name]) & set(bank.vocabulary())
        },
        "groups": group_accuracy(bank, features[rows[IMAGENET]], [truth[r] for r in rows[IMAGENET]]),
    }
    if heads and (file := heads / f"{IMAGENET}.npz").is_file():
        with np.load(file, allow_pickle=False) as head:
            text = torch.from_numpy(head["features"])
            order = [entries[IMAGENET][folder] for folder in head["folders"].tolist()]
        own = [truth[r] for r in rows[IMAGENET]]
        for k in (1, 5):
            numbers[f"imagenet_text_head_top{k}"] = accuracy(features[rows[IMAGENET]], own, order, lambda _: text, k)
    return numbers


def accuracy(
    features: Tensor,
    truth: Sequence[str],
    candidates: Sequence[str],
    features_of: Callable[[Sequence[str]], Tensor],
    k: int = 1,
) -> dict[str, float]:
    """Share of photos whose entry is among the ``k`` nearest candidates, with its standard error."""
    nearest = functional.logits(features, features_of(candidates)).topk(k).indices.tolist()
    right = [entry in [candidates[i] for i in row] for entry, row in zip(truth, nearest, strict=True)]
    share = sum(right) / len(right)
    error = (share * (1 - share) / len(right)) ** 0.5
    return {"percent": round(100 * share, 2), "standard_error": round(100 * error, 2), "photos": len(right)}


def group_accuracy(bank: LabelBank, features: Tensor, truth: Sequence[str]) -> dict[str, object]:
    """Which of the checked groups a photo belongs to, over the ImageNet photos that belong to one."""
    group_of = {member: group for group in NAMES["checked_groups"] for member in bank.groups[group]}
    rows = [row for row, entry in enumerate(truth) if entry in group_of]
    asked = [group_of[truth[row]] for row in rows]
    all_of_them = accuracy(features[rows], asked, NAMES["checked_groups"], bank.features)
    each = {}
    for group in NAMES["checked_groups"]:
        own = [row for row in rows if group_of[truth[row]] == group]
        each[group] = accuracy(features[own], [group] * len(own), NAMES["checked_groups"], bank.features)
    return {"choices": len(NAMES["checked_groups"]), "all": all_of_them, "each": each}


def main() -> int:
    """Run the tool."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, metavar="DATA_DIR")
    parser.add_argument("--heads", type=Path, metavar="HEADS_DIR", help="class names, as <set>.npz")
    parser.add_argument("--out", type=Path, default=BANK_FILE, help="the bank (default: the one in the package)")
    parser.add_argument("--photo-features", type=Path, metavar="FILE", help="keep the features of single photos here")
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"), help="the shipped bank is fp32")
    parser.add_argument("--measure", type=Path, metavar="FILE", help="also score the test photos; results as JSON")
    asked = parser.parse_args()
    try:
        bank = make(asked.data, asked.heads, asked.out, asked.photo_features, asked.dtype)
        print(f"{asked.out}: {bank}, {asked.out.stat().st_size:,} bytes, vocabulary of {len(bank.vocabulary())}")
        if asked.measure:
            numbers = measure(bank, asked.data, asked.heads, asked.photo_features, asked.dtype)
            write_text(asked.measure, json.dumps(describe(bank, asked.data, asked.dtype) | numbers, indent=1) + "\n")
            print(f"{asked.measure}: ImageNet top-1 {numbers['imagenet_top1']}")
    except ReactClipError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def describe(bank: LabelBank, data: Path, dtype: str) -> dict[str, object]:
    """Command, versions, device and size of the bank."""
    return {
        "command": "python tools/make_label_bank.py data/ --heads heads/ --measure benchmarks/results/label-bank.json",
        "versions": versions(),
        "device": f"{encoders.loading.resolve_device(None)}, {dtype}",
        "bank": {
            "encoder": bank.encoder,
            "names": len(bank.names),
            "groups": len(bank.groups),
            "vocabulary": len(bank.vocabulary()),
            "photos": len(photos_of(data, "train")),
        },
    }


if __name__ == "__main__":
    sys.exit(main())
