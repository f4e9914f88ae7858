"""Functions as one kernel: compared before they are trusted, one for every number of images, and never in the way."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from react_clip import fusing, noise
from react_clip.bench.syncs import host_syncs
from toys import toy_images


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


def test_a_kernel_that_is_there_serves_small_batches(eager_to_fuse: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusing, "_FROM", 12)
    kernel_calls = []

    def compile_(function: Any, **options: object) -> Any:
        return lambda *tensors: kernel_calls.append(tuple(tensors[0].shape)) or function(*tensors)

    monkeypatch.setattr(torch, "compile", compile_)
    double = fusing.fused(lambda x: 2.0 * x)(lambda x: x + x)
    for shape in [(2, 3), (4, 3), (2, 3), (1, 3), (2, 5)]:
        assert torch.equal(double(torch.ones(shape)), torch.full(shape, 2.0))
    assert kernel_calls == [(4, 3), (2, 3)], "too small to begin with, alone, or of another shape"
    with fusing.unfused():
        double(torch.ones(4, 3))
    assert len(kernel_calls) == 2
    # What is counted is what is written, and looking at it spoils no kernel.
    assert host_syncs(lambda: double(torch.ones(4, 3)).tolist()) == ["tolist"]
    assert len(kernel_calls) == 2
    double(torch.ones(4, 3))
    assert len(kernel_calls) == 3


def test_integers_must_agree_to_the_last_one(eager_to_fuse: None, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_calls = []

    def compile_(function: Any, **options: object) -> Any:
        return lambda *tensors: kernel_calls.append(1) or function(*tensors) + 1

    monkeypatch.setattr(torch, "compile", compile_)
    bits = fusing.fused(lambda x: x.view(torch.int32).long() << 32)(lambda x: x.view(torch.int32).long() << 32)
    for _ in range(2):
        assert bits(torch.ones(2)).tolist() == [0x3F800000 << 32] * 2
    assert kernel_calls == [1], "one in 2**62 is nothing to a float, but another key"
