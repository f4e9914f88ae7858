"""Functions as one kernel: compared before they are trusted, one for every number of images, and never in the way."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from react_clip import ReACT, augment, fusing, noise
from react_clip.bench import host_syncs
from toys import toy_classifier, toy_images


@pytest.fixture
def eager_to_fuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this were a GPU and every tensor large."""
    monkeypatch.setattr(fusing, "_ON", {"cpu"})
    monkeypatch.setattr(fusing, "_FROM", 1)


def test_the_noisy_view_is_one_graph_for_every_batch(eager_to_fuse: None, monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[int] = []

    def count_graphs(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        traced.append(len(graph.graph.nodes))
        return graph.forward

    # Traced for real, but run as traced: a machine code compiler is not what is tested here.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=count_graphs))
    plain = noise._noisy_view.__wrapped__  # type: ignore[attr-defined]
    view = fusing.fused(noise._noisy_pairs)(plain)
    steps = noise._steps(3 * 16 * 16 // 2, torch.device("cpu"))
    for count in (5, 5, 3, 8, 2):
        pixels, keys = toy_images(count), torch.arange(count)
        sigma = torch.linspace(0.1, 0.2, count)
        assert torch.equal(view(pixels, keys, sigma, steps), plain(pixels, keys, sigma, steps))
    assert len(traced) == 1, "one graph, whatever the number of images"
    assert traced[0] > 10


@pytest.mark.parametrize(("error", "calls"), [(1e-3, 1), (1e-8, 3)], ids=["differs", "agrees"])
def test_a_kernel_is_compared_before_it_is_trusted(
    error: float, calls: int, eager_to_fuse: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel_calls = []

    def compile_(function: Any, **options: object) -> Any:
        assert options == {"fullgraph": True}, "one kernel, not several"
        return lambda *tensors: kernel_calls.append(1) or function(*tensors) + error

    monkeypatch.setattr(torch, "compile", compile_)
    double = fusing.fused(lambda x: 2.0 * x)(lambda x: x + x)
    for _ in range(3):
        assert torch.allclose(double(torch.ones(2)), torch.full((2,), 2.0), rtol=0, atol=1e-6)
    assert len(kernel_calls) == calls


def test_without_a_compiler_nothing_changes(eager_to_fuse: None, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def no_compiler(function: Any, **options: object) -> Any:
        tried.append(1)
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(torch, "compile", no_compiler)
    double = fusing.fused(lambda x: 2.0 * x)(lambda x: x + x)
    leaf = torch.ones(2, requires_grad=True)
    (slope,) = torch.autograd.grad(double(leaf).sum(), leaf)
    assert tried == [], "what needs gradients is not fused"
    assert slope.tolist() == [2.0, 2.0]
    assert double(torch.ones(2, dtype=torch.float64)).tolist() == [2.0, 2.0]
    assert tried == []
    assert [double(torch.ones(2)).tolist() for _ in range(3)] == [[2.0, 2.0]] * 3
    assert tried == [1], "decided once"


def test_what_decides_is_the_batch_at_hand(eager_to_fuse: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusing, "_FROM", 12)
    kernel_calls = []

    def compile_(function: Any, **options: object) -> Any:
        return lambda *tensors: kernel_calls.append(tuple(tensors[0].shape)) or function(*tensors)

    monkeypatch.setattr(torch, "compile", compile_)
    double = fusing.fused(lambda x: 2.0 * x)(lambda x: x + x)

    def shapes_of_kernels(*shapes: tuple[int, int]) -> list[tuple[int, int]]:
        kernel_calls.clear()
        for shape in shapes:
            assert torch.equal(double(torch.ones(shape)), torch.full(shape, 2.0))
        return kernel_calls

    asked = [(2, 3), (4, 3), (2, 3), (1, 3), (2, 5), (1, 12), (0, 3)]
    assert shapes_of_kernels(*asked) == [(4, 3)], "what came before changes nothing"
    with fusing.part_of(torch.ones(4, 3)):
        assert shapes_of_kernels(*asked) == [(2, 3), (4, 3), (2, 3), (2, 5)]
    with fusing.part_of(torch.ones(2, 3)):
        assert shapes_of_kernels(*asked) == [(4, 3)]
    with fusing.unfused(), fusing.part_of(torch.ones(4, 3)):
        assert shapes_of_kernels(*asked) == []
    # What is counted is what is written, and looking at it spoils no kernel.
    assert host_syncs(lambda: double(torch.ones(4, 3)).tolist()) == ["tolist"]
    assert shapes_of_kernels(*asked) == [(4, 3)]


def test_a_few_images_of_a_large_batch_are_fused(eager_to_fuse: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = toy_images(12)
    monkeypatch.setattr(fusing, "_FROM", pixels.numel())
    clf, guard, sizes = toy_classifier(), ReACT(tau=2.0, max_batch=64), []
    with fusing.unfused():
        before = guard(clf, pixels)

    def compile_(function: Any, **options: object) -> Any:
        return lambda *tensors: sizes.append((function.__name__, len(tensors[0]))) or function(*tensors)

    monkeypatch.setattr(torch, "compile", compile_)
    for module, name, by_number in [
        (noise, "_multilinear", noise._multilinear_number),
        (noise, "_noisy_view", noise._noisy_pairs),
        (augment, "_blurred", augment._blurred_number),
        (augment, "_jittered", augment._jittered_number),
    ]:
        monkeypatch.setattr(module, name, fusing.fused(by_number)(getattr(module, name).__wrapped__))
    after = guard(clf, pixels)
    undecided, opened = int((~after.instability.isnan()).sum()), int(after.gated.sum())
    assert 1 < undecided < 12
    assert 1 < opened < 12
    assert sizes == [
        ("_multilinear_number", 12),
        ("_noisy_pairs", 24),
        *((name, undecided) for name in ("_blurred_number", "_noisy_pairs", "_jittered_number")),
        *(("_noisy_pairs", count) for count in [64] * (10 * opened // 64) + [10 * opened % 64]),
    ]
    assert torch.allclose(before.features, after.features, atol=1e-5)


def test_integers_must_agree_to_the_last_one(eager_to_fuse: None, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_calls = []

    def compile_(function: Any, **options: object) -> Any:
        return lambda *tensors: kernel_calls.append(1) or function(*tensors) + 1

    monkeypatch.setattr(torch, "compile", compile_)
    bits = fusing.fused(lambda x: x.view(torch.int32).long() << 32)(lambda x: x.view(torch.int32).long() << 32)
    for _ in range(2):
        assert bits(torch.ones(2)).tolist() == [0x3F800000 << 32] * 2
    assert kernel_calls == [1], "one in 2**62 is nothing to a float, but another key"
