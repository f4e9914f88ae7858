"""Ideas of `tried.py` about the tower: images of two sizes together, kernels, fewer bits, fewer layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from _int8 import multiply_in_int8
from _setting import SIZES, Entry, Setting, Ways
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from react_clip import functional
from react_clip.accelerate import AcceleratedBackend, Backend
from react_clip.attacks import Corruption
from react_clip.augment import smaller_copy
from react_clip.encoders import layers
from react_clip.encoders.base import Encoder
from react_clip.encoders.hf import HFEncoder
from react_clip.encoders.layers import AddNorm, FusedQuickGELU, Projections
from react_clip.encoders.openclip import wrap_model
from react_clip.encoders.vision import QuickGELU, VisionEncoder, ViTEncoder, first_tokens
from react_clip.zeroshot import ZeroShotClassifier

# ---------------------------------------------------------------------- views of several sizes


@contextmanager
def replaced(target: object, name: str, value: object) -> Iterator[None]:
    """Within the block an attribute of an instance is another."""
    setattr(target, name, value)
    try:
        yield
    finally:
        delattr(target, name)


def one_graph(setting: Setting) -> Entry:
    """Image and look of a small batch made and encoded by one CUDA graph."""
    before = setting.classifier(setting.load(compile=True))
    after = setting.classifier(setting.load(compile=True))
    separately = partial(one_by_one, after.encoder)  # sizes one after the other in both
    with (
        replaced(before.encoder, "make_and_encode", before.encoder._encode_each),
        replaced(after.encoder, "_compute_views", separately),
    ):
        speed = setting.compare(before, after)
    return setting.entry(
        "one graph for image and look",
        "One image: copy, both passes and unit length as one CUDA graph instead of one for each pass.",
        **speed["second look, batch 1"],
        milliseconds=speed,
    )


def packed(setting: Setting) -> Entry:
    """Both sizes of a batch in one pass, attention size by size."""
    before, after = (setting.load(compile=True) for _ in range(2))

    def way(encoder: VisionEncoder, batch: int, together: bool) -> Callable[[], object]:
        compute = encoder._compute_packed if together else partial(one_by_one, encoder)
        pixels = setting.clean[:batch]

        def features(pixels: Tensor) -> Tensor:
            return torch.stack(compute(views_of(pixels)), 1)

        return lambda: encoder.backend(features, pixels)

    speed = {}
    for encoder in (before, after):
        for size in SIZES:
            encoder.update_positions(size)
    for batch in setting.batches:
        ways = {"before": way(before, batch, False), "after": way(after, batch, True)}
        speed[f"batch {batch}"] = setting.turns(ways, batch)
    one, other = (
        torch.stack(compute(views_of(setting.clean[:8])), 1)
        for compute in (partial(one_by_one, before), before._compute_packed)
    )
    return setting.entry(
        "both sizes in one pass",
        "One image and its look: tokens of both sizes in one matrix, attention size by size, instead of two passes.",
        **speed["batch 1"],
        milliseconds=speed,
        agreement={"smallest_cosine": torch.cosine_similarity(one, other, dim=-1).min().item()},
    )


def one_by_one(encoder: Encoder, views: list[Tensor]) -> list[Tensor]:
    """Features of the views, by one pass after the other."""
    return [encoder._compute(view) for view in views]


def views_of(pixels: Tensor) -> list[Tensor]:
    """The images and their looks."""
    return [pixels, smaller_copy(pixels, SIZES[1])]


# ---------------------------------------------------------------------- the tower


def own_layers(library: str, setting: Setting) -> Entry:
    """The ViT-B/16 of another library with random weights, by the layers of the offline tower instead of its own."""
    before = random_tower(library).to(setting.device, setting.dtype)
    after = deepcopy(before).accelerate()
    Encoder.accelerate(before)  # without our layers
    speed = setting.compare(setting.classifier(before), setting.classifier(after))
    images = setting.clean[: setting.batch]
    cosines = torch.cosine_similarity(before.encode_views(images), after.encode_views(images))
    return setting.entry(
        f"weights of {library} in our tower",
        "The layers of the offline tower with the weights of another library's: the plain encoder of ViT-B/16.",
        **speed[f"plain, batch {setting.batch}"],
        milliseconds=speed,
        agreement={"smallest_cosine": cosines.min().item()},
    )


def random_tower(library: str) -> ViTEncoder:
    """A ViT-B/16 of ``transformers``, or of ``open_clip`` with the exact GELU of its own weights, not trained."""
    if library == "open_clip":
        import open_clip

        encoder = wrap_model(open_clip.create_model("ViT-B-16"), name=library, dim=512, tokenizer=None)
        assert isinstance(encoder, ViTEncoder)
        return encoder
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    config = CLIPVisionConfig(patch_size=16, projection_dim=512)
    return HFEncoder(CLIPVisionModelWithProjection(config), name=library, tokenizer=None)


def patches(setting: Setting) -> Entry:
    """The patch embedding as a matrix product instead of a convolution."""
    before, after = accelerated_pair(setting)
    embeddings: Any = before.encoder.tower.vision_model["embeddings"]  # type: ignore[union-attr,index]

    def convolve(normalised: Tensor, positions: Tensor | None) -> Tensor:
        positions = embeddings.position_embedding.weight if positions is None else positions
        tokens = embeddings.patch_embedding(normalised).flatten(2).transpose(1, 2)
        first = embeddings.class_embedding.expand(len(tokens), 1, -1)
        return torch.cat([first, tokens], 1) + positions

    with replaced(embeddings, "forward", convolve):
        return compared(
            setting,
            "patches by a matrix product",
            "The patch embedding as a matrix product instead of a convolution: the plain encoder.",
            *(before, after),
        )


def accelerated_pair(setting: Setting) -> tuple[ZeroShotClassifier, ZeroShotClassifier]:
    """Two accelerated classifiers with towers of their own, one of which an idea changes."""
    return setting.classifier(setting.load(compile=True)), setting.classifier(setting.load(compile=True))


def compared(setting: Setting, idea: str, what: str, before: ZeroShotClassifier, after: ZeroShotClassifier) -> Entry:
    """The entry of a change of the tower: times of both versions, and how far their features lie apart."""
    speed = setting.compare(before, after)
    one, other = (clf.encoder.encode_views(setting.clean[: setting.batch]) for clf in (before, after))
    return setting.entry(
        idea,
        what,
        **speed[f"plain, batch {setting.batch}"],
        milliseconds=speed,
        agreement={"smallest_cosine": (one * other).sum(1).min().item(), "same_bits": torch.equal(one, other)},
    )


def compared_defended(
    setting: Setting, idea: str, what: str, before: ZeroShotClassifier, after: ZeroShotClassifier, *, batch: int
) -> Entry:
    """The entry of a change that matters to SecondLook: times of both versions, and how often they answer alike."""
    speed = setting.compare(before, after)
    agreement = setting.agreement(after, before)
    return setting.entry(idea, what, **speed[f"second look, batch {batch}"], milliseconds=speed, agreement=agreement)


def activation(setting: Setting) -> Entry:
    """QuickGELU by one Triton kernel with the roundings of three operations."""
    before, after = (separate_activations(setting) for _ in range(2))
    for layer in first_layers(before):
        layer.forward = partial(linear_then_activation, layer)
    return compared(
        setting,
        "QuickGELU as one kernel",
        "QuickGELU, x sigmoid(1.702 x), as one Triton kernel instead of three operations: the plain encoder.",
        *(before, after),
    )


def activation_in_parts(setting: Setting) -> Entry:
    """QuickGELU on a CPU part by part, in the memory of its input, instead of three operations on all of it."""
    before, after = accelerated_pair(setting)
    for module in before.encoder.tower.modules():
        if isinstance(module, QuickGELU):
            module.forward = lambda hidden: hidden * torch.sigmoid(1.702 * hidden)
    return compared(
        setting,
        "QuickGELU in parts",
        "QuickGELU part by part in the memory of its input, instead of three operations on all of it: the plain "
        "encoder.",
        *(before, after),
    )


def linear_then_activation(layer: FusedQuickGELU, tokens: Tensor) -> Tensor:
    return layer.activation(torch.nn.functional.linear(tokens, layer.weight, layer.bias))  # type: ignore[no-any-return]


def linear_activation(setting: Setting) -> Entry:
    """A linear layer and its QuickGELU by one Triton kernel."""
    return compared(
        setting,
        "linear layer and QuickGELU as one kernel",
        "The first layer of the perceptrons and QuickGELU by one Triton kernel instead of cuBLAS and a kernel: the "
        "plain encoder.",
        *(separate_activations(setting), setting.classifier(setting.load(compile=True))),
    )


def separate_activations(setting: Setting) -> ZeroShotClassifier:
    clf = setting.classifier(setting.load(compile=True))
    for layer in first_layers(clf):
        layer._suits = lambda tokens: False
    return clf


def first_layers(clf: ZeroShotClassifier) -> list[Any]:
    return [layer for layer in clf.encoder.tower.modules() if isinstance(layer, FusedQuickGELU)]


def normalising(setting: Setting) -> Entry:
    """Pixels normalised by one Triton kernel."""
    before, after = accelerated_pair(setting)
    before.encoder.backend.normalise = Backend().normalise  # type: ignore[method-assign]
    return compared(
        setting,
        "pixels normalised by a kernel",
        "Mean, standard deviation and precision of the pixels by one Triton kernel instead of three operations: the "
        "plain encoder.",
        *(before, after),
    )


def positions_in_place(setting: Setting) -> Entry:
    """Patches added to the position embeddings in place."""
    before, after = accelerated_pair(setting)
    embeddings: Any = after.encoder.tower.vision_model["embeddings"]  # type: ignore[union-attr,index]
    embeddings.forward = partial(add_in_place, embeddings)
    return compared(
        setting,
        "patches added in place",
        "Patches added to copies of the position embeddings, instead of joined with the class token and then added: "
        "the plain encoder.",
        *(before, after),
    )


def add_in_place(embeddings: Any, normalised: Tensor, positions: Tensor | None) -> Tensor:
    positions = embeddings.position_embedding.weight if positions is None else positions
    convolution, side = embeddings.patch_embedding, embeddings.patch_embedding.kernel_size[0]
    rows = normalised.shape[2] // side
    grid = normalised.unflatten(3, (rows, side)).unflatten(2, (rows, side)).permute(0, 2, 4, 1, 3, 5)
    tokens = positions.repeat(len(normalised), 1, 1)
    tokens[:, 1:] += torch.nn.functional.linear(grid.flatten(3).flatten(1, 2), convolution.weight.flatten(1))
    tokens[:, 0] += embeddings.class_embedding
    return tokens


def resizing(setting: Setting) -> Entry:
    """Smaller copies by one Triton kernel."""
    before, after = accelerated_pair(setting)
    before.encoder.backend.smaller_copy = smaller_copy  # type: ignore[method-assign]
    return compared_defended(
        setting,
        "smaller copies by a kernel",
        "The looks made by a Triton kernel instead of PyTorch's antialiased interpolation: SecondLook.",
        *(before, after),
        batch=setting.batch,
    )


def attention(setting: Setting) -> Entry:
    """The kernels that PyTorch has for attention on a GPU."""
    clf, images = setting.clf, setting.clean[: setting.batch]

    def way(backend: SDPBackend) -> Callable[[], object]:
        def encode() -> object:
            with sdpa_kernel(backend):
                return clf.encoder.encode_views(images)

        return encode

    kernels = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)
    ways: Ways = {"default": setting.plain(clf, images, len(images)), **{one.name: way(one) for one in kernels}}
    spent = setting.turns(ways, len(images))
    return setting.entry(
        "attention by cuDNN",
        "Attention by cuDNN instead of FlashAttention 2: the plain encoder.",
        spent[SDPBackend.FLASH_ATTENTION.name],
        spent[SDPBackend.CUDNN_ATTENTION.name],
        milliseconds=spent,
    )


def qkv(setting: Setting) -> Entry:
    """Queries, keys and values by one matrix product."""
    before, after = accelerated_pair(setting)
    for module in before.encoder.tower.modules():
        if isinstance(module, Projections):
            module._joint = None
    return compared_defended(
        setting,
        "one product for queries, keys and values",
        "Their three weight matrices joined: one image, SecondLook.",
        *(before, after),
        batch=1,
    )


def moving(setting: Setting) -> Entry:
    """Moved copies by two Triton kernels."""
    before, after = accelerated_pair(setting)
    before.encoder.backend.moved = Backend().moved  # type: ignore[method-assign]
    return compared_defended(
        setting,
        "moved copies by two kernels",
        "Hash of the pixels and motion by two Triton kernels instead of seventy operations: one image, SecondLook.",
        *(before, after),
        batch=1,
    )


def one_attention(setting: Setting) -> Entry:
    """Attention of all sizes of a small batch by one kernel."""
    before, after = accelerated_pair(setting)
    with patch.object(layers, "_varlen_attention", lambda device: None):  # when the graphs of `before` are recorded
        for batch in setting.batches:
            setting.defended(before, setting.clean[:batch], batch)()
    return compared_defended(
        setting,
        "attention of all sizes by one kernel",
        "Attention for sequences of different lengths instead of one kernel per size: one image, SecondLook.",
        *(before, after),
        batch=1,
    )


def side_by_side(setting: Setting) -> Entry:
    """Image and look of a batch of more than 16 images on two streams."""
    before, after = accelerated_pair(setting)
    before.encoder._compute_views = before.encoder._compute_packed
    return compared_defended(
        setting,
        "image and look side by side",
        "Both passes on two CUDA streams of one graph instead of the tokens of both in one matrix: SecondLook.",
        *(before, after),
        batch=setting.batch,
    )


class GraphsOfTheEncoder(AcceleratedBackend):
    """CUDA graphs for functions of pixels alone."""

    def records(self, rows: int, *tensors: Tensor, share: float = 1.0) -> bool:
        return tensors[0].ndim == 4 and super().records(rows, *tensors, share=share)


def comparison(setting: Setting) -> Entry:
    """Decision and answers of a small batch as a CUDA graph."""
    before, after = accelerated_pair(setting)
    before.encoder.backend = GraphsOfTheEncoder()
    return compared_defended(
        setting,
        "graph of the comparison",
        "One image: decision and answers, forty small operations, as a CUDA graph instead of one by one.",
        *(before, after),
        batch=1,
    )


def last_block(setting: Setting) -> Entry:
    """The last block for the class token only."""
    before, after = accelerated_pair(setting)
    last: Any = before.encoder.tower.vision_model["encoder"]["layers"][-1]  # type: ignore[union-attr,index]
    last.forward = partial(all_tokens, last.forward)
    return compared(
        setting,
        "class token alone in the last block",
        "The last block computes the class token, all that the feature needs, and not all tokens: the plain encoder.",
        *(before, after),
    )


def all_tokens(forward: Callable[..., Any], *inputs: Any, first_only: bool) -> tuple[Tensor, ...]:
    tokens, update = forward(*inputs)
    return tuple(first_tokens(each, inputs[-1]) for each in (tokens, update))


def add_norm(setting: Setting) -> Entry:
    """Residual addition and LayerNorm by one Triton kernel."""
    before, after = accelerated_pair(setting)
    for module in before.encoder.tower.modules():
        if isinstance(module, AddNorm):
            module.fused = False
    return compared(
        setting,
        "addition and LayerNorm as one kernel",
        "What attention and perceptron add to the tokens, added and normalised by one Triton kernel instead of two: "
        "the plain encoder.",
        *(before, after),
    )


def sixteen_bits(setting: Setting) -> Entry:
    """fp16 and bf16 against fp32: the plain encoder's time, and SecondLook's decisions and answers."""
    exact = setting.classifier(setting.load(dtype="fp32"))
    towers = {name: setting.classifier(setting.load(dtype=name, compile=True)) for name in ("fp32", "bf16", "fp16")}
    images, batch = setting.clean, setting.batch
    spent = setting.turns({name: setting.plain(clf, images, batch) for name, clf in towers.items()}, len(images))
    return setting.entry(
        "16 bits for SecondLook",
        "The tower in fp16 instead of fp32: the plain encoder.",
        spent["fp32"],
        spent["fp16"],
        milliseconds=spent,
        agreement={name: setting.agreement(clf, exact) for name, clf in towers.items() if name != "fp32"},
    )


def int8_tower(setting: Setting) -> Entry:
    """Matrix products of the blocks in int8: the plain encoder's time, and SecondLook's decisions and answers."""
    exact = setting.classifier(setting.load(dtype="fp32", compile=True))
    before, after = accelerated_pair(setting)
    multiply_in_int8(after.encoder.tower)
    images, batch = setting.clean, setting.batch
    towers = {"fp32": exact, "bf16": before, "int8": after}
    spent = setting.turns({name: setting.plain(clf, images, batch) for name, clf in towers.items()}, len(images))
    return setting.entry(
        "int8 on a GPU",
        "Matrix products of the tower in int8 (weights by channel, activations by token) instead of bf16: the plain "
        "encoder.",
        spent["bf16"],
        spent["int8"],
        milliseconds=spent,
        agreement={"int8": setting.agreement(after, exact)},
    )


def early_layer(setting: Setting) -> Entry:
    """The gate's distance after an early layer: which share of attacked and of damaged photos lies above clean ones."""
    encoder = setting.load()
    encoder.update_positions(SIZES[1])
    model = encoder.tower.vision_model
    caught: dict[int, Tensor] = {}

    def distances(images: Tensor) -> dict[int, Tensor]:
        found: dict[int, list[Tensor]] = {}
        for part in images.split(setting.batch):
            each: list[dict[int, Tensor]] = []
            for view in views_of(part):
                encoder.encode_views(view)
                each.append(dict(caught))
            for depth in caught:
                found.setdefault(depth, []).append(functional.drift(*(features[depth] for features in each)))
        return {depth: torch.cat(parts) for depth, parts in found.items()}

    def catch(depth: int, _: nn.Module, __: object, result: tuple[Tensor, Tensor]) -> None:
        features = encoder.tower.visual_projection(model["post_layernorm"](sum(result)[:, 0]))  # type: ignore[operator,index]
        caught[depth] = functional.normalize(features.float())

    blocks: Any = model["encoder"]["layers"]  # type: ignore[index]
    hooks = [blocks[depth - 1].register_forward_hook(partial(catch, depth)) for depth in (6, 8, 10, 11, 12)]
    clean = distances(setting.clean)
    few = setting.clean[: setting.args.attacked]
    damage = [Corruption(type="noise", severity=0.02), Corruption(type="jpeg", severity=50)]
    kinds = {
        "PGD at 1/255": setting.attacked_at(1 / 255),
        **{kind.name: kind(setting.clf, few, setting.clf(few).argmax(-1), seed=0).images for kind in damage},
    }
    shares = {
        kind: {f"layer {depth}": _share_above(drift, clean[depth]) for depth, drift in distances(images).items()}
        for kind, images in kinds.items()
    }
    for hook in hooks:
        hook.remove()
    look = smaller_copy(setting.clean[: setting.batch], SIZES[1]).to(encoder.dtype)
    positions = encoder._tables[SIZES[1]].positions
    ways: Ways = {str(depth): partial(forward_to, encoder.tower, depth, look, positions) for depth in (12, 6)}
    spent = setting.turns(ways, len(look))
    return setting.entry(
        "look stopped at an early layer",
        "The look through 6 of 12 layers.",
        spent["12"],
        spent["6"],
        agreement={"photos": len(setting.clean), "share above the distance of 97 % of clean photos": shares},
    )


def _share_above(drift: Tensor, clean: Tensor) -> float:
    return (drift >= clean.quantile(0.97)).double().mean().item()


def forward_to(tower: Any, depth: int, normalised: Tensor, positions: Tensor) -> Tensor:
    """The tower without the layers after ``depth``."""
    tokens, update = tower._embed(normalised, positions), None
    for block in tower.vision_model["encoder"]["layers"][:depth]:
        tokens, update = block(tokens, update)
    _, features = tower.vision_model["post_layernorm"](tokens[:, 0], update[:, 0])
    return tower.visual_projection(features)  # type: ignore[no-any-return]
