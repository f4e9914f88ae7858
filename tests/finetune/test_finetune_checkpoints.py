"""Towers from files: every layout gives the same features in every encoder, and nothing half-fitting is loaded."""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import react_clip as rc
import tiny_clip
from react_clip import storage
from react_clip.encoders import checkpoints

State = dict[str, Tensor]
PIXELS = torch.rand(3, 3, tiny_clip.SIZE, tiny_clip.SIZE, generator=torch.Generator().manual_seed(5))


def prefixed(prefix: str, state: State) -> State:
    return {prefix + key: tensor for key, tensor in state.items()}


def bare(openai: State) -> State:
    return {key.removeprefix("visual."): tensor for key, tensor in openai.items() if key.startswith("visual.")}


def vision(hf: State) -> State:
    return {key: tensor for key, tensor in hf.items() if key.startswith(("vision_model.", "visual_projection."))}


def without_tower(hf: State) -> State:
    return {key.removeprefix("vision_model."): tensor for key, tensor in vision(hf).items()}


IDS = {"vision_model.embeddings.position_ids": torch.arange(17)[None]}
PROMPTER: dict[str, Any] = {"epoch": 3, "state_dict": {"pad_up": torch.zeros(2)}}
LAYOUTS: dict[str, Callable[[State, State], dict[str, Any]]] = {
    "openai, both towers": lambda openai, hf: openai,
    "openai, image tower": lambda openai, hf: prefixed("visual.", bare(openai)),
    "openai, bare": lambda openai, hf: bare(openai),
    "openai, module.clip.": lambda openai, hf: prefixed("module.clip.", openai),
    "state_dict": lambda openai, hf: {"state_dict": prefixed("module.", openai), "epoch": 2},
    "tecoa's own": lambda openai, hf: PROMPTER | {"vision_encoder_state_dict": bare(openai)},
    "hf, image tower": lambda openai, hf: vision(hf),
    "hf, module.model.": lambda openai, hf: prefixed("module.model.", vision(hf)),
    "hf, vision_model. twice": lambda openai, hf: prefixed("vision_model.", vision(hf)),
    "hf, without vision_model.": lambda openai, hf: without_tower(hf),
}


def write(folder: Path, content: dict[str, Any]) -> Path:
    if all(isinstance(value, Tensor) for value in content.values()):
        file = folder / "weights.safetensors"
        save_file({key: tensor.contiguous().clone() for key, tensor in content.items()}, file)
    else:
        file = folder / "weights.pt"
        torch.save(content, file)
    return file


@pytest.fixture(scope="module")
def states(other_openai: Path, other_folder: Path) -> tuple[State, State]:
    return load_file(other_openai), load_file(other_folder / "model.safetensors")


@pytest.fixture(scope="module")
def expected(other_folder: Path) -> Tensor:
    return rc.load(other_folder, device="cpu").raw(PIXELS)


@pytest.fixture(scope="module")
def bases(encoder: rc.Encoder, open_clip_name: str) -> tuple[rc.Encoder, rc.Encoder]:
    return encoder, rc.load(open_clip_name, device="cpu")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_features_in_both_libraries(
    layout: str, states: tuple[State, State], expected: Tensor, bases: tuple[rc.Encoder, rc.Encoder], tmp_path: Path
) -> None:
    file = write(tmp_path, LAYOUTS[layout](*states))
    for base, tolerance in zip(bases, (0.0, 1e-4), strict=True):
        assert (expected - base.raw(PIXELS)).abs().max() > 0.1, (
            "the towers must differ for this test to see a difference"
        )
        loaded = copy.deepcopy(base)
        checkpoints.load_tower(loaded, file)
        assert torch.allclose(loaded.raw(PIXELS), expected, atol=tolerance, rtol=0)


def test_a_checkpoint_is_asked_for_with_a_plus(
    tiny_folder: Path, open_clip_name: str, other_openai: Path, expected: Tensor, bases: tuple[rc.Encoder, rc.Encoder]
) -> None:
    for name, base in zip((f"{tiny_folder}+{other_openai}", f"{open_clip_name}+{other_openai}"), bases, strict=True):
        loaded = rc.load(name, device="cpu")
        assert loaded.name == name
        assert loaded.feature_space == base.name, "class features of the base stay those of the finetuned tower"
        assert torch.allclose(loaded.raw(PIXELS), expected, atol=1e-4)
        assert torch.equal(loaded.encode_text(["a cat"]), base.encode_text(["a cat"])), "the text tower is the base's"


def without(state: State, *keys: str) -> State:
    return {key: tensor for key, tensor in state.items() if key not in keys}


QUERY = "vision_model.encoder.layers.0.self_attn.q_proj.weight"


def test_files_without_exactly_one_fitting_tower_are_refused(
    states: tuple[State, State], tiny_folder: Path, tmp_path: Path
) -> None:
    openai, hf = states
    without_bias = without(openai, "visual.ln_post.weight", "visual.ln_post.bias")
    nan, integers = openai["visual.conv1.weight"] * torch.nan, openai["visual.proj"].long()
    files: dict[str, dict[str, Any]] = {
        r"1 tensors differ, such as proj, whose shape is None instead of \[64, 32\]": without(openai, "visual.proj"),
        r"2 tensors differ, such as ln_post\.\w+, whose shape is None": without_bias,
        r"such as transformer\.resblocks\.0\.attn\.in_proj_weight, whose shape is None": prefixed(
            "module.", without(vision(hf), QUERY)
        ),
        r"adapter, whose shape is \[1\] instead of None": openai | {"visual.adapter": torch.zeros(1)},
        r"positional_embedding, whose shape is \[50, 64\] instead of \[17, 64\]": openai
        | {"visual.positional_embedding": torch.zeros(50, 64)},
        r"conv1\.weight with other than finite": openai | {"visual.conv1.weight": nan},
        r"proj with other than finite": openai | {"visual.proj": integers},
        "holds no CLIP image tower": {"head.weight": torch.zeros(2)},
        r"holds 2 image towers \('s\.visual\.', 't\.visual\.'\)": prefixed("s.", openai) | prefixed("t.", openai),
        r"more than tensors \(argparse\.Namespace\).*safetensors": {"args": argparse.Namespace(lr=1)},
    }
    for message, content in files.items():
        with pytest.raises(rc.ReactClipError, match=message):
            rc.load(f"{tiny_folder}+{write(tmp_path, content)}", device="cpu")


def test_what_is_no_checkpoint_is_refused_in_one_line(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(rc.ReactClipError, match=r"the checkpoint 'runs/none\.pt', which is no file here"):
        rc.load("clip-vit-b-16+runs/none.pt", device="cpu")
    for file in (tmp_path / "damaged.safetensors", tmp_path / "damaged.pt", tmp_path / "damaged.bin"):
        file.write_bytes(b"hello, I am no checkpoint")
        with pytest.raises(rc.ReactClipError, match=file.name):
            rc.load(f"{tiny_folder}+{file}", device="cpu")
    (tmp_path / "notes.txt").write_text("no weights")
    with pytest.raises(
        rc.ReactClipError, match=r"ends in '\.txt'; a checkpoint is a \.safetensors, \.pt, \.pth, \.bin"
    ):
        rc.load(f"{tiny_folder}+{tmp_path / 'notes.txt'}", device="cpu")


def test_a_plus_sign_in_a_path_stays_what_it_is(tiny_folder: Path, other_openai: Path, tmp_path: Path) -> None:
    odd = tmp_path / "a+b" / "c+d"
    odd.parent.mkdir()
    odd.symlink_to(tiny_folder)
    assert rc.load(odd, device="cpu").name == str(odd)
    file = tmp_path / "x+y" / "tower+1.safetensors"
    file.parent.mkdir()
    file.write_bytes(other_openai.read_bytes())
    assert checkpoints.split_name(f"{odd}+{file}") == (str(odd), file)
    both = rc.load(f"{odd}+{file}", device="cpu")
    plain = rc.load(f"{tiny_folder}+{other_openai}", device="cpu")
    assert torch.equal(both.raw(PIXELS), plain.raw(PIXELS))


@pytest.fixture
def run_folder(tiny_folder: Path, states: tuple[State, State], tmp_path: Path) -> Path:
    """A finished finetuning run, written by hand."""
    folder = tmp_path / "run"
    storage.write_tensors(folder / "tower.safetensors", prefixed("visual.", bare(states[0])))
    digest = storage.sha256_of(folder / "tower.safetensors")
    (folder / "finetune.json").write_text(json.dumps({"model": str(tiny_folder), "sha256": digest}))
    return folder


def test_a_run_folder_names_its_base(run_folder: Path, tiny_folder: Path, other_folder: Path) -> None:
    expected = rc.load(other_folder, device="cpu").raw(PIXELS)
    for name in (str(run_folder), f"{tiny_folder}+{run_folder}"):
        loaded = rc.load(name, device="cpu")
        assert loaded.name == name
        assert torch.equal(loaded.raw(PIXELS), expected)
    assert rc.pull(str(run_folder)) == str(tiny_folder)


def test_a_damaged_run_folder_is_refused(run_folder: Path) -> None:
    tower = run_folder / "tower.safetensors"
    content = bytearray(tower.read_bytes())
    content[-1] ^= 1
    tower.write_bytes(content)
    with pytest.raises(rc.ReactClipError, match=r"is missing or not the file that finetune\.json describes"):
        rc.load(run_folder)
    tower.unlink()
    with pytest.raises(rc.ReactClipError, match=r"tower\.safetensors is missing"):
        rc.load(run_folder)
    (run_folder / "finetune.json").write_text("{}")
    with pytest.raises(rc.ReactClipError, match="does not name a model"):
        rc.load(run_folder)
    (run_folder / "finetune.json").unlink()
    (run_folder / "settings.json").write_text("{}")
    with pytest.raises(rc.ReactClipError, match="has not finished; give the same `react-clip finetune` command again"):
        rc.load(run_folder)


def test_lasting_names_do_not_depend_on_the_working_directory(
    tiny_folder: Path, other_openai: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_folder.parent)
    assert checkpoints.lasting_name(tiny_folder.name) == str(tiny_folder.resolve())
    monkeypatch.chdir(other_openai.parent)
    assert checkpoints.lasting_name(f"clip-vit-b-16+{other_openai.name}") == f"clip-vit-b-16+{other_openai.resolve()}"
    assert checkpoints.lasting_name("openai/clip-vit-base-patch32") == "openai/clip-vit-base-patch32"
