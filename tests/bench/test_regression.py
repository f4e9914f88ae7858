"""Cost regressions: encoder passes, encoder calls and host synchronisations are counted, never seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import react_clip as rc
from react_clip import noise
from react_clip.bench.timing import peak_memory
from react_clip.bench.workload import gate_scores, open_gate_for
from react_clip.defenses.react import FIRST_VIEWS
from react_clip.encoders.vision import VisionTower
from toys import on_a_gpu, patch_encoder, toy_classifier, toy_images

IMAGES = 8
# Ceilings. Raise one only with a reason and a measurement; lower it when something became cheaper.
READS = 3
"""Values that the host waits for: the range check at the door, and between two stages the rows that go on."""
UPLOADS = 0
"""Blocking copies to the device; the augmentation's colour matrices are sent once in the life of a process."""
PEAK = 12.0
"""Tensors of all tokens that the tower holds at once on a CPU; a hidden layer counts as four."""
UPLOADING = {"tensor", "as_tensor", "new_tensor"}
READING = {"nonzero", "_local_scalar_dense", "masked_select", "equal", "_unique2", "unique_dim"}
"""Operators whose result the host must read before it can go on."""
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
"""Operators that do so with a mask as index."""

SHARES = {"clean": 0.0, "mixed": 0.5, "attacked": 1.0}


class HostSyncs(TorchDispatchMode):
    """Records the operators of a call at which the host would wait for a GPU, on any machine."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name in INDEXING and any(isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1])
        by_repeats = name == "repeat_interleave" and not (kwargs or {}).get("output_size")
        if name in READING or by_mask or by_repeats:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


class HostCopies(TorchFunctionMode):
    """Records blocking copies between host and device, which reach no operator on a CPU."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("cpu", "tolist", "new_tensor") or (name in UPLOADING and (kwargs or {}).get("device") is not None):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def host_syncs(call: Callable[[], object]) -> list[str]:
    """The operations of a call at which the host would wait for a GPU, in order."""
    with HostSyncs() as operators, HostCopies(operators.seen):
        call()
    return operators.seen


def guard_for(traffic: str, clf: rc.ZeroShotClassifier, images: Tensor) -> rc.ReACT:
    """ReACT whose gate opens for the share of this traffic; all views of a stage fit into one call."""
    guard = rc.ReACT(max_batch=1000)
    return open_gate_for(guard, gate_scores(clf, guard, images, batch=IMAGES), SHARES[traffic])


def split(syncs: list[str]) -> tuple[int, int]:
    """Number of synchronisations that read, and that upload."""
    uploads = sum(name in UPLOADING for name in syncs)
    return len(syncs) - uploads, uploads


@pytest.mark.parametrize("traffic", SHARES)
def test_no_view_is_encoded_that_cannot_change_the_answer(traffic: str) -> None:
    clf, images = toy_classifier(), toy_images(IMAGES)
    guard = guard_for(traffic, clf, images)
    before, calls = clf.encoder.encoded, clf.encoder.calls
    out = guard(clf, images, seed=0)
    gated = out.gated.sum().item()
    measured = (~out.instability.isnan()).sum().item()
    assert gated == SHARES[traffic] * IMAGES
    # Clean view and two probes for all, the augmented view for the undecided, ten anchor views for open gates.
    assert clf.encoder.encoded - before == 3 * IMAGES + measured + 10 * gated == out.passes.sum().item()
    # Whatever is encoded shares one call with all of its stage.
    assert clf.encoder.calls - calls == 1 + (measured > 0) + (gated > 0)


@pytest.mark.parametrize("traffic", SHARES)
@pytest.mark.parametrize("lazy", [True, False])
def test_the_host_waits_no_more_often_than_before(traffic: str, lazy: bool) -> None:
    clf, images = toy_classifier(), toy_images(IMAGES)
    guard = guard_for(traffic, clf, images).replace(lazy=lazy)
    guard.replace(lazy=False)(clf, images, seed=0)
    syncs = host_syncs(lambda: guard(clf, images, seed=0))
    reads, uploads = split(syncs)
    assert reads <= READS, syncs
    assert uploads <= UPLOADS, syncs


def test_a_round_of_views_is_one_wait() -> None:
    clf, images = toy_classifier(), toy_images(IMAGES)
    guard = guard_for("attacked", clf, images).replace(sequential=0.99)
    reads, uploads = split(host_syncs(lambda: guard(clf, images, seed=0)))
    assert guard(clf, images, seed=0).passes.max().item() > 3 + FIRST_VIEWS, "some image must need a second round"
    assert reads <= READS + 1
    assert uploads <= UPLOADS


def test_second_look_waits_once_and_draws_numbers_only_for_moved_images(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, images = patch_encoder(), torch.rand(IMAGES, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    clf = rc.ZeroShotClassifier.from_features(encoder, list("ab"), torch.eye(2, 12))
    hashed: list[int] = []
    keys_of = noise.keys_of_seeds
    monkeypatch.setattr(noise, "keys_of_seeds", lambda part, seeds: hashed.append(len(part)) or keys_of(part, seeds))
    for threshold in (2.0, 0.0):
        hashed.clear()
        guard = rc.SecondLook(threshold=threshold)
        out = guard(clf, images)
        moved = int(out.gated.sum())
        assert hashed == ([moved] if moved else [])
        assert host_syncs(lambda guard=guard: guard(clf, images)) == ["tolist", "_local_scalar_dense"]
    assert moved == IMAGES


def test_a_block_frees_its_attention_before_the_perceptron() -> None:
    """Peak memory of the tower, in tensors of all its tokens."""
    width, images = 64, torch.rand(8, 3, 64, 64)
    tower = VisionTower(width=width, hidden=4 * width, layers=3, heads=2, size=64, patch=4, dim=16)
    with torch.no_grad():
        peak = peak_memory(lambda: tower(images), torch.device("cpu"))
    assert peak / (4 * 8 * 257 * width) < PEAK


def test_the_number_of_images_does_not_make_the_host_wait_more_often() -> None:
    clf, guard = toy_classifier(), rc.ReACT(lazy=False, max_batch=1000)
    counts = [Counter(host_syncs(lambda n=n: guard(clf, toy_images(n), seed=0))) for n in (2, 16)]
    assert counts[0] == counts[1]


def test_the_counter_can_fail() -> None:
    x, rows = torch.arange(6.0), torch.tensor([0, 2])
    waits = {
        "_local_scalar_dense": lambda: bool((x > 2).any()),
        "nonzero": lambda: (x > 2).nonzero(),
        "index": lambda: x[x > 2],
        "index_put_": lambda: x.clone().__setitem__(x > 2, torch.zeros(())),
        "repeat_interleave": lambda: x.repeat_interleave(x.long()),
        "tolist": lambda: x.tolist(),
        "tensor": lambda: torch.tensor([1.0], device=x.device),
    }
    assert {name: host_syncs(call)[:1] for name, call in waits.items()} == {name: [name] for name in waits}
    assert host_syncs(lambda: torch.where(x > 2, x[rows].sum(), x).sort().values.argmax()) == []


@on_a_gpu
@pytest.mark.parametrize("traffic", SHARES)
def test_a_real_device_agrees(traffic: str) -> None:
    clf, images = toy_classifier().cuda(), toy_images(IMAGES).cuda()
    guard = guard_for(traffic, clf, images)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="synchronizing") as seen:
            guard(clf, images, seed=0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(seen) <= READS + UPLOADS
