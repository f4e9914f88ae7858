"""Cost regressions: encoder passes, encoder calls and host synchronisations are counted, never seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import react_clip as rc
from react_clip.bench.hardware import host_syncs
from react_clip.bench.workload import gate_scores, open_gate_for
from react_clip.defenses.react import FIRST_VIEWS
from toys import on_a_gpu, toy_classifier, toy_images

IMAGES = 8
# Ceilings. Raise one only with a reason and a measurement; lower it when something became cheaper.
READS = 3
"""Values that the host waits for: the range check at the door, and between two stages the rows that go on."""
UPLOADS = 0
"""Blocking copies to the device; the augmentation's colour matrices are sent once in the life of a process."""
UPLOADING = {"tensor", "as_tensor", "new_tensor", "to"}

SHARES = {"clean": 0.0, "mixed": 0.5, "attacked": 1.0}


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


def test_the_number_of_images_does_not_make_the_host_wait_more_often() -> None:
    clf, guard = toy_classifier(), rc.ReACT(lazy=False, max_batch=1000)
    counts = [Counter(host_syncs(lambda n=n: guard(clf, toy_images(n), seed=0))) for n in (2, 16)]
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("_local_scalar_dense", lambda x: x.sum().item()),
        ("_local_scalar_dense", lambda x: bool((x > 2).any())),
        ("nonzero", lambda x: (x > 2).nonzero()),
        ("index", lambda x: x[x > 2]),
        ("index_put_", lambda x: x.clone().__setitem__(x > 2, torch.zeros(()))),
        ("masked_select", lambda x: x.masked_select(x > 2)),
        ("equal", lambda x: torch.equal(x, x + 1)),
        ("_unique2", lambda x: x.unique()),
        ("repeat_interleave", lambda x: x.repeat_interleave(x.long())),
        ("cpu", lambda x: x.cpu()),
        ("to", lambda x: x.to("cpu")),
        ("tolist", lambda x: x.tolist()),
        ("tensor", lambda x: torch.tensor([1.0], device=x.device)),
        ("new_tensor", lambda x: x.new_tensor([1.0])),
        ("to", lambda x: rc.augment._RGB_TO_YIQ.to(x)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_counter_sees(name: str, call: Callable[[Tensor], object]) -> None:
    x = torch.arange(5.0)
    assert name in host_syncs(lambda: call(x))


def test_the_counter_leaves_the_rest_alone() -> None:
    x, rows = torch.arange(6.0), torch.tensor([0, 2])
    quiet = [
        lambda: x[rows] + x.index_copy(0, rows, x[rows]).sum(),
        lambda: torch.where(x > 2, x, 0.0).to(torch.float64),
        lambda: torch.full((3,), 2.0, device=x.device).repeat_interleave(4),
        lambda: torch.arange(3, device=x.device).sort().values.argmax(),
        lambda: x.to("cpu", non_blocking=True),
    ]
    assert [host_syncs(call) for call in quiet] == [[]] * len(quiet)
    assert host_syncs(lambda: x.sum().item()) == ["_local_scalar_dense"]


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
