"""The model's queue: what it refuses, what it forgets, and what a model that hangs looks like from outside."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch
from serve_client import LABELS, SECOND_LOOK

import react_clip as rc
from react_clip.serve.client import ModelClient
from react_clip.serve.errors import RequestError
from react_clip.serve.model import Model
from react_clip.serve.settings import Settings

Check = Callable[[ModelClient], Awaitable[None]]


class Held:
    """A model on a thread that can be held; ``batches`` are the sizes of its batches."""

    def __init__(self, encoder: rc.Encoder, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> None:
        values = {"queue": 32, "batch": 4, "deadline": 60.0, "max_labels": 200, **fields}
        self.settings = Settings.model_validate(values)
        preset = rc.ZeroShotClassifier(encoder, LABELS)
        self.model = Model(SECOND_LOOK, preset, self.settings)
        self.free, self.batches, self.prompts = threading.Event(), list[int](), list[int]()
        self.address = f"inproc://held-{id(self)}"
        run, encode_text, self.fails = self.model._run, encoder.encode_text, False

        def held(pixels: torch.Tensor, *rest: Any, **options: Any) -> rc.Defended:
            assert self.free.wait(60)
            self.batches.append(len(pixels))
            if self.fails:
                raise RuntimeError("of the test")
            return run(pixels, *rest, **options)

        def counted(prompts: list[str]) -> torch.Tensor:
            assert self.free.wait(60)
            self.prompts.append(len(prompts))
            return encode_text(prompts)

        monkeypatch.setattr(self.model, "_run", held)
        monkeypatch.setattr(encoder, "encode_text", counted)

    def check(self, what: Check) -> None:
        """Run a check with a client; its loop is in a thread, because a browser's may run in this one."""

        async def connected() -> None:
            client = ModelClient(self.address, self.settings)
            with self.model.running(self.address):
                await client.connect()
                try:
                    await asyncio.wait_for(what(client), 60)
                finally:
                    self.free.set()
                    client.close()

        with ThreadPoolExecutor() as thread:
            thread.submit(asyncio.run, connected()).result()


@pytest.fixture
def hold(encoder: rc.Encoder, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Held]:
    return lambda **fields: Held(encoder, monkeypatch, **fields)


def ask(client: ModelClient, images: int = 1, labels: list[str] | None = None) -> asyncio.Task[Any]:
    pixels = torch.randint(0, 255, (images, 3, 32, 32), dtype=torch.uint8)
    names = None if labels is None else (labels, [])
    return asyncio.create_task(client.submit(pixels, list(range(images)), names))


async def forget(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def test_the_queue_takes_a_request_whole_or_not_at_all(hold: Any) -> None:
    held = hold()

    async def check(client: ModelClient) -> None:
        tasks = [ask(client, 16), ask(client, 12)]
        await asyncio.sleep(0.05)
        with pytest.raises(RequestError, match="queue is full"):
            await ask(client, 8)
        tasks.append(ask(client, 4))
        await asyncio.sleep(0.05)
        assert client.refusal(1) is not None
        held.free.set()
        assert [len(await task) for task in tasks] == [16, 12, 4]
        assert sorted(held.batches) == [4, 12, 16], "requests larger than --batch have batches of their own"

    held.check(check)


def test_abandoned_images_free_their_places_and_are_not_computed(hold: Any) -> None:
    held = hold()

    async def check(client: ModelClient) -> None:
        first = ask(client)
        await asyncio.sleep(0.2)  # it is being computed
        abandoned = [ask(client, 15), ask(client, 16)]
        await asyncio.sleep(0.2)
        assert client.refusal(16) is not None
        await forget(*abandoned)
        assert client.refusal(16) is None
        kept = ask(client, 2)
        await asyncio.sleep(0.2)
        held.free.set()
        await asyncio.gather(first, kept)
        assert sum(held.batches) == 3

    held.check(check)


def test_prompts_of_new_labels_take_places_end_with_their_callers_and_let_images_pass(hold: Any) -> None:
    held = hold(queue=64)

    async def check(client: ModelClient) -> None:
        first = ask(client)
        await asyncio.sleep(0.2)
        lists = [[f"thing {number} {place}" for number in range(200)] for place in range(4)]
        tasks = [ask(client, 1, labels) for labels in lists]
        await asyncio.sleep(0.3)
        image = ask(client, 16)
        held.free.set()
        await asyncio.gather(first, image)
        # Half of the 64 places are for prompts: 13 of each list, so that two lists fit.
        refused = [task for task in tasks if task.done()]
        assert len(refused) == 2
        for task in refused:
            with pytest.raises(RequestError, match="too many new labels"):
                task.result()
        assert sum(held.prompts) <= 200, "images are answered first"
        computed = sum(held.prompts)
        await forget(*[task for task in tasks if not task.done()])
        await ask(client, 16)
        assert sum(held.prompts) <= computed + 32, "nobody waits for the rest"

    held.check(check)


def test_label_lists_are_computed_once(hold: Any) -> None:
    held = hold()
    held.free.set()

    async def check(client: ModelClient) -> None:
        names = ["a boat", "a zebra"]
        await asyncio.gather(*(ask(client, 1, names) for _ in range(3)))
        answers = await ask(client, 1, names)
        assert len(answers[0].probs) == 2
        assert held.prompts == [2]

    held.check(check)


def test_images_that_waited_too_long_are_refused(hold: Any) -> None:
    held = hold(deadline=3.0)

    async def check(client: ModelClient) -> None:
        first = ask(client)
        await asyncio.sleep(0.2)
        late = ask(client)
        await asyncio.sleep(1.6)
        held.free.set()
        await first
        with pytest.raises(RequestError, match="not ready within 3 s"):
            await late

    held.check(check)


def test_a_batch_that_fails_ends_its_requests_only(hold: Any) -> None:
    held = hold()
    held.free.set()
    held.fails = True

    async def check(client: ModelClient) -> None:
        with pytest.raises(RequestError, match="could not answer"):
            await ask(client, 6)
        held.fails = False
        assert len(await ask(client, 6)) == 6
        assert client.refusal(16) is None

    held.check(check)
