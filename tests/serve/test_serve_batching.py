"""The engine: who shares a batch, what that must not change, and who is not held up."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import react_clip as rc
from react_clip import noise
from react_clip.preprocess import to_pixels
from react_clip.serve.classes import ClassList
from react_clip.serve.engine import Batch, Engine, EngineError, OverloadedError, Photo

GUARD = rc.ReACT(tau=1.48)
SECRET = b"some secret bytes"


@pytest.fixture
def engine(encoder: rc.Encoder) -> Iterator[Engine]:
    """Not started: what is queued before the start shares a batch."""
    preset = ClassList.of(rc.ZeroShotClassifier(encoder, ["cat", "dog", "teapot"]))
    engine = Engine(encoder, GUARD, preset, secret=SECRET, batch=16, queue=32, label_cache=2)
    yield engine
    engine.stop()


def prepared(photos: list[bytes]) -> list[Photo]:
    pixels = [to_pixels(photo, 32) for photo in photos]
    return [Photo(image, noise.stream_keys(image[None], SECRET)[0]) for image in pixels]


def watch(engine: Engine) -> list[Batch]:
    batches: list[Batch] = []
    engine.observer = batches.append
    return batches


def test_images_of_different_lists_share_a_batch_and_keep_their_answers(
    engine: Engine, encoder: rc.Encoder, photos: list[bytes]
) -> None:
    other = ClassList.of(rc.ZeroShotClassifier(encoder, ["zebra", "boat", "a red car", "moon", "cup"]))
    batches = watch(engine)
    lists = [engine.preset if i % 3 else other for i in range(len(photos))]
    futures = [engine.submit([photo], classes)[0] for photo, classes in zip(prepared(photos), lists, strict=True)]
    engine.start()
    answers = [future.result() for future in futures]
    assert batches[0].images == len(photos) + 1, "the warm-up image came last and went with them"
    assert batches[0].lists == 2
    assert {answer.passes for answer in answers} >= {3, 13}, "gates that opened and gates that did not"
    for photo, classes, answer in zip(photos, lists, answers, strict=True):
        clf = rc.ZeroShotClassifier.from_features(encoder, classes.names, classes.features)
        alone = GUARD(clf, [photo], seed=SECRET)
        assert classes.names[int(answer.probs.argmax())] == alone.names[0]
        assert torch.allclose(answer.feature, alone.features[0], atol=1e-5)
        assert torch.allclose(answer.probs, alone.probs[0], atol=1e-3)
        assert (answer.gated, answer.passes) == (bool(alone.gated[0]), int(alone.passes[0]))
    gated, passes = sum(answer.gated for answer in answers), sum(answer.passes for answer in answers)
    assert batches[0].opened - gated in (0, 1), "the warm-up image may have opened its gate too"
    assert batches[0].passes - passes in (3, 4, 13, 14)


def test_who_wants_the_feature_gets_all_views(engine: Engine, photos: list[bytes]) -> None:
    engine.guard = GUARD.replace(tau=-1e9, sequential=0.5)
    engine.start()
    ready = prepared(photos[:4])
    answers = [future.result() for future in engine.submit(ready, engine.preset)]
    features = [future.result() for future in engine.submit(ready, engine.preset, whole=True)]
    assert [answer.passes for answer in features] == [13] * 4
    assert sum(answer.passes for answer in answers) < 4 * 13
    mixed = engine.submit(ready[:2], engine.preset) + engine.submit(ready[2:], engine.preset, whole=True)
    assert [one.result().passes for one in mixed] == [answers[0].passes, answers[1].passes, 13, 13]
    assert torch.allclose(mixed[3].result().feature, features[3].feature, atol=1e-5)


def test_the_queue_takes_a_request_whole_or_not_at_all(engine: Engine, photos: list[bytes]) -> None:
    ready = prepared(photos)
    engine.submit(ready + ready, engine.preset)
    with pytest.raises(OverloadedError):
        engine.submit(ready, engine.preset)
    assert engine.depth == 24
    assert engine.room == 8
    engine.submit(ready[:8], engine.preset)
    assert engine.room == 0


def test_what_was_given_up_is_not_computed(engine: Engine, photos: list[bytes]) -> None:
    batches = watch(engine)
    kept, dropped = engine.submit(prepared(photos[:2]), engine.preset)
    assert dropped.cancel()
    engine.start()
    assert kept.result().passes > 0
    assert batches[0].images == 2, "the kept one and the warm-up"


def test_a_long_label_list_does_not_hold_up_images(engine: Engine, photos: list[bytes]) -> None:
    engine.start()
    long = engine.classes(tuple(f"thing {i}" for i in range(600)), None)
    assert engine.submit(prepared(photos[:1]), engine.preset)[0].result().passes > 0
    assert not long.done(), "the image went between two steps of the list"
    assert long.result().features.shape == (600, 32)


def test_label_lists_are_shared_kept_and_bounded(engine: Engine, encoder: rc.Encoder) -> None:
    engine.start()
    first = engine.classes(("cat", "boat"), None)
    assert engine.classes(("cat", "boat"), None) is first
    expected = rc.ZeroShotClassifier(encoder, ["cat", "boat"]).class_features
    assert torch.allclose(first.result().features, expected, atol=1e-5)
    ensemble = rc.ZeroShotClassifier(encoder, ["cat", "boat"], templates=["a {}", "the {}!"]).class_features
    assert torch.allclose(engine.classes(("cat", "boat"), ("a {}", "the {}!")).result().features, ensemble, atol=1e-5)
    engine.classes(("dog",), None).result()
    assert engine.classes(("cat", "boat"), None) is not first, "two lists are kept, this one was the oldest"


def test_a_failure_costs_its_batch_and_not_the_engine(
    engine: Engine, photos: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.start()
    with monkeypatch.context() as patch:
        patch.setattr(engine.encoder, "encode_views", lambda pixels: pixels.flatten(1)[:, :32] * torch.nan)
        with pytest.raises(EngineError):
            engine.submit(prepared(photos[:1]), engine.preset)[0].result()
        patch.setattr(engine.encoder, "encode_text", lambda prompts: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.classes(("new",), None).result()
    assert engine.submit(prepared(photos[:1]), engine.preset)[0].result().passes > 0
    assert engine.classes(("new",), None).result().names == ("new",), "a list that failed is not remembered"


def test_what_waits_is_answered_before_the_end(engine: Engine, photos: list[bytes]) -> None:
    engine.start()
    futures = engine.submit(prepared(photos), engine.preset)
    engine.stop()
    assert all(future.done() for future in futures)
    assert not engine.alive
    with pytest.raises(OverloadedError):
        engine.submit(prepared(photos[:1]), engine.preset)


def test_concurrent_requests_share_batches_and_keep_their_answers(server: Any, photos: list[bytes]) -> None:
    bodies = [
        {"images": [base64.b64encode(photo).decode()], **({"labels": ["zebra", "boat"]} if i % 2 else {})}
        for i, photo in enumerate(photos)
    ] * 3
    alone = [server.client.post("/v1/classify", json=body).json() for body in bodies[: len(photos)]] * 3
    names = ("react_clip_batch_images_sum", "react_clip_batch_images_count")
    before = [server.metric(name) for name in names]
    start = threading.Barrier(len(bodies))

    def post(body: dict[str, Any]) -> Any:
        start.wait()
        return server.client.post("/v1/classify", json=body).json()

    with ThreadPoolExecutor(len(bodies)) as pool:
        together = list(pool.map(post, bodies))
    images, batches = (server.metric(name) - old for name, old in zip(names, before, strict=True))
    assert images == len(bodies)
    assert batches < images, "some images must have shared a batch"
    for one, many in zip(alone, together, strict=True):
        assert [result["label"] for result in one["results"]] == [result["label"] for result in many["results"]]
        assert one["results"][0]["probability"] == pytest.approx(many["results"][0]["probability"], abs=1e-3)
