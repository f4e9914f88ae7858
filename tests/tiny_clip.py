"""A small random CLIP written twice, in Hugging Face layout and as an open_clip checkpoint, with the same weights."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file

from react_clip.encoders.checkpoints import PROJECTION, to_openai

SIZE, PATCH, WIDTH, HEADS, LAYERS, DIM = 32, 8, 64, 2, 2, 32
OPEN_CLIP_NAME = "tiny-test-clip"


def write_hf(folder: Path, *, activation: str = "quick_gelu", seed: int = 0) -> Path:
    """A complete CLIP (both towers and the real tokenizer) that ``CLIPModel.from_pretrained`` reads."""
    from transformers import CLIPConfig, CLIPModel

    torch.manual_seed(seed)
    tower = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": LAYERS}
    tower |= {"hidden_act": activation, "num_attention_heads": HEADS, "projection_dim": DIM}
    config = CLIPConfig(
        text_config={**tower, "vocab_size": 49408, "eos_token_id": 49407, "bos_token_id": 49406, "pad_token_id": 49407},
        vision_config={**tower, "image_size": SIZE, "patch_size": PATCH},
        projection_dim=DIM,
    )
    model = CLIPModel(config)
    with torch.no_grad():
        model.logit_scale.fill_(math.log(100.0))
        # The library initialises with tiny weights; larger ones make a tower whose features move with its input.
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and "embedding" not in name:
                parameter.normal_(std=0.12)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """CLIP's byte-pair vocabulary, from the copy that open_clip bundles."""
    import open_clip
    from open_clip.tokenizer import bytes_to_unicode

    bundled = Path(open_clip.__file__).parent / "bpe_simple_vocab_16e6.txt.gz"
    with gzip.open(bundled) as stream:
        merges = stream.read().decode("utf-8").split("\n")[1 : 49152 - 256 - 2 + 1]
    letters = list(bytes_to_unicode().values())
    vocabulary = [*letters, *(letter + "</w>" for letter in letters), *("".join(merge.split()) for merge in merges)]
    vocabulary += ["<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(vocabulary)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    special = {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    special["unk_token"] = "<|endoftext|>"
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "CLIPTokenizer", **special}))


def write_open_clip(hf_folder: Path, folder: Path) -> Path:
    """The same weights in open_clip's key layout; registers the model's configuration and returns the checkpoint."""
    import open_clip
    from transformers import CLIPModel

    source = CLIPModel.from_pretrained(hf_folder).state_dict()
    # The names of the two text towers differ in the way of the image towers, but for one.
    text = {key.replace("text_model.", "vision_model."): each for key, each in source.items() if "text_model." in key}
    text = {key.replace("vision_model.final_layer_norm.", "ln_final."): each for key, each in text.items()}
    image = {key: each for key, each in source.items() if key.startswith(("vision_model.", PROJECTION))}
    target = to_openai(text) | {f"visual.{key}": each for key, each in to_openai(image).items()}
    target |= {"logit_scale": source["logit_scale"], "text_projection": source["text_projection.weight"].T}
    config = {
        "embed_dim": DIM,
        "quick_gelu": True,
        "vision_cfg": {"image_size": SIZE, "layers": LAYERS, "width": WIDTH, "patch_size": PATCH, "head_width": 32},
        "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": WIDTH, "heads": HEADS, "layers": LAYERS},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{OPEN_CLIP_NAME}.json").write_text(json.dumps(config))
    open_clip.add_model_config(folder / f"{OPEN_CLIP_NAME}.json")
    checkpoint = folder / "weights.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in target.items()}, checkpoint)
    return checkpoint
