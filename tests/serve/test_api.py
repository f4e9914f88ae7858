"""Every endpoint: its answers are the library's, and wrong requests get one clear line."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import re
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from serve_client import KEYS, LABELS, SECOND_LOOK, as_form, as_json, check_error, metric, png, saved
from starlette.testclient import TestClient

import react_clip as rc
from react_clip import serve
from react_clip.serve import reading

Direct = Callable[..., rc.Defended]


@pytest.mark.parametrize("write", [as_json, as_form])
def test_classify_returns_the_librarys_answers(client: Any, direct: Direct, photos: list[bytes], write: Any) -> None:
    answer = client.post("/v1/classify", **write(photos, top_k=3))
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == client.get("/v1/models").json()["data"][0]["id"]
    expected = direct(photos)
    results = answer.json()["results"]
    assert [result["index"] for result in results] == list(range(len(photos)))
    assert [result["label"] for result in results] == expected.names
    for result, probs in zip(results, expected.probs, strict=True):
        scores = {scored["label"]: scored["probability"] for scored in result["answers"]}
        assert torch.allclose(torch.tensor([scores[name] for name in LABELS]), probs, atol=1e-3)
        assert result["probability"] == result["answers"][0]["probability"] == max(scores.values())
        assert result["diagnostics"] is None, "diagnostics are off by default"


def test_labels_of_a_request(client: Any, direct: Direct, photos: list[bytes]) -> None:
    names = ("zebra", "a red car", "Über-Kater")
    as_list = '["zebra", "a red car", "Über-Kater"]'
    for write, labels in ((as_json, list(names)), (as_form, ", ".join(names)), (as_form, as_list)):
        answer = client.post("/v1/classify", **write(photos[:4], labels=labels, top_k=1))
        assert [result["label"] for result in answer.json()["results"]] == direct(photos[:4], names).names
        assert all(len(result["answers"]) == 1 for result in answer.json()["results"])
    comma = client.post("/v1/classify", **as_form(photos[:1], labels='["cat, wet", "dog"]')).json()
    assert {scored["label"] for scored in comma["results"][0]["answers"]} == {"cat, wet", "dog"}


@pytest.mark.parametrize("write", [as_json, as_form])
def test_embed_has_the_shape_of_openai(client: Any, direct: Direct, photos: list[bytes], write: Any) -> None:
    numbers = client.post("/v1/embeddings", **write(photos)).json()
    text = client.post("/v1/embeddings", **write(photos, encoding_format="base64")).json()
    assert numbers["object"] == "list"
    assert numbers["usage"] == {"prompt_tokens": 0, "total_tokens": 0, "images": len(photos)}
    features = torch.tensor([row["embedding"] for row in numbers["data"]])
    assert torch.allclose(features, direct(photos).features, atol=1e-5)
    for row, feature in zip(text["data"], features, strict=True):
        decoded = np.frombuffer(base64.b64decode(row["embedding"]), "<f4").copy()
        assert torch.allclose(torch.from_numpy(decoded), feature)
    alone = torch.tensor(client.post("/v1/embeddings", **write(photos[:1])).json()["data"][0]["embedding"])
    assert torch.allclose(alone, features[0], rtol=0, atol=1e-6), "whatever else is in its batch, up to rounding"


def test_requests_of_different_labels_share_batches_and_keep_their_answers(client: Any, photos: list[bytes]) -> None:
    bodies = [as_json([photo], **({"labels": ["zebra", "boat"]} if i % 2 else {})) for i, photo in enumerate(photos)]
    alone = [client.post("/v1/classify", **body).json() for body in bodies] * 3
    names = ("react_clip_batch_images_sum", "react_clip_batch_images_count")
    service = client.app.state.service
    before = [service.metrics.text().decode()]
    with ThreadPoolExecutor(len(bodies)) as pool:
        together = list(pool.map(lambda body: client.post("/v1/classify", **body).json(), bodies * 3))
    texts = [*before, service.metrics.text().decode()]
    images, batches = (
        float.__sub__(*(float(re.findall(rf"^{name} (.*)$", text, re.M)[0]) for text in texts[::-1])) for name in names
    )
    assert images == 3 * len(bodies)
    assert batches < images, "some images must have shared a batch"
    for one, many in zip(alone, together, strict=True):
        assert one["results"][0]["label"] == many["results"][0]["label"]
        assert one["results"][0]["probability"] == pytest.approx(many["results"][0]["probability"], abs=1e-3)


def test_diagnostics(open_client: Any, direct: Direct, photos: list[bytes]) -> None:
    expected = direct(photos, guard=SECOND_LOOK)
    attacked = expected.diagnostics["gate_open"].bool().tolist()
    assert len(set(attacked)) == 2, "the photos must show both cases"
    for path, write, rows in (("/v1/classify", as_json, "results"), ("/v1/embeddings", as_form, "data")):
        answer = open_client.post(path, **write(photos)).json()[rows]
        assert [row["diagnostics"]["suspicious"] for row in answer] == attacked
        for i, shown in enumerate(row["diagnostics"] for row in answer):
            for name in ("drift", "lead", "score"):
                assert shown[name] == pytest.approx(float(expected.diagnostics[name][i]), abs=1e-4)
            assert (shown["gated"], shown["passes"]) == (bool(expected.gated[i]), float(expected.passes[i]))
    info = open_client.get("/v1/info").json()
    assert (info["defence"]["name"], info["defence"]["tau"]) == ("second_look", 0.27)
    assert info["diagnostics"]


@pytest.mark.parametrize(
    "defense", [rc.Undefended(), rc.defenses.AntiAdv(), rc.defenses.TTC()], ids=lambda one: one.kind
)
def test_any_defence_can_be_served(start: Any, direct: Direct, photos: list[bytes], defense: rc.Defense) -> None:
    client = start(defense, diagnostics=True)
    results = client.post("/v1/classify", **as_json(photos[:3])).json()["results"]
    expected = direct(photos[:3], guard=defense)
    assert [result["label"] for result in results] == expected.names
    assert [result["diagnostics"]["gated"] for result in results] == expected.gated.tolist()


def test_health_and_info(client: Any) -> None:
    assert client.get("/healthz").json() == {"status": "alive"}
    assert client.get("/readyz").json() == {"status": "ready"}
    info = client.get("/v1/info").json()
    assert info["labels"] == {"preset": ["cat", "dog", "teapot"], "free": True, "source": "text"}
    assert (info["defence"]["name"], info["defence"]["tau"]) == ("react", 1.48)
    assert (info["diagnostics"], info["demo"], info["limits"]["max_images"]) == (False, False, 16)
    assert "/" not in info["model"], "the model's folder is not shown to callers"


def test_metrics_count(open_client: Any, photos: list[bytes]) -> None:
    branches = [f'images_total{{branch="{branch}"}}' for branch in ("keep", "correct")]
    names = ("images_total", "encoder_passes_total", *branches)
    before = {name: metric(open_client, f"react_clip_{name}") for name in names}
    answers = open_client.post("/v1/classify", **as_json(photos)).json()["results"]
    after = {name: metric(open_client, f"react_clip_{name}") - before[name] for name in names}
    gated = sum(answer["diagnostics"]["gated"] for answer in answers)
    assert gated == sum(answer["diagnostics"]["suspicious"] for answer in answers)
    assert after["images_total"] == len(photos)
    assert [after[name] for name in branches] == [len(photos) - gated, gated]
    assert after["encoder_passes_total"] == sum(answer["diagnostics"]["passes"] for answer in answers)
    text = open_client.get("/metrics").text
    assert 'react_clip_requests_total{method="POST",route="/v1/classify",status="200"}' in text
    for name in ("react_clip_queue_images", "react_clip_request_seconds_bucket", "react_clip_rejected_total"):
        assert name in text


def test_the_demo_attacks_a_photo(open_client: Any, client: Any, photos: list[bytes]) -> None:
    assert open_client.get("/v1/info").json()["demo"] is True
    answer = open_client.post("/v1/demo/attack", **as_form(photos[1:2], eps="8", labels="cat,zebra,boat")).json()
    assert answer["attacked_label"] == answer["clean"]["plain"][0]["label"]
    assert answer["attacked"]["plain"][0]["label"] != answer["attacked_label"]
    assert answer["amplification"] == pytest.approx(127 / 8)
    for picture in (answer["clean"]["image"], answer["attacked"]["image"], answer["perturbation"]):
        assert base64.b64decode(picture.removeprefix("data:image/png;base64,")).startswith(b"\x89PNG")
    still = open_client.post("/v1/demo/attack", **as_form(photos[1:2], eps="0")).json()
    assert still["clean"]["image"] == still["attacked"]["image"]
    assert still["clean"]["plain"][0]["label"] == still["attacked"]["plain"][0]["label"]
    check_error(open_client.post("/v1/demo/attack", **as_json(photos[:1], eps=17)), 422, "eps")
    check_error(open_client.post("/v1/demo/attack", **as_json(photos[:2])), 422, "images")
    check_error(client.post("/v1/demo/attack", json={}), 404)


def test_a_request_enters_few_functions(start: Any, photos: list[bytes]) -> None:
    """Functions of the service on the event loop and the thread that decodes; the model's thread works on batches."""
    entered: set[str] = set()
    folder = str(Path(serve.__file__).parent)

    def profile(frame: Any, event: str, _: object) -> None:
        code = frame.f_code
        ours = code.co_filename.startswith(folder) and not code.co_name.startswith("<")
        if event == "call" and ours and threading.current_thread().name != "react-clip-model":
            entered.add(code.co_qualname)

    threading.setprofile(profile)  # the client's threads start now
    try:
        client = start()
        client.post("/v1/classify", **as_json(photos[:1]))
    finally:
        threading.setprofile(None)
        sys.setprofile(None)
    time.sleep(0.1)
    entered.clear()
    assert client.post("/v1/classify", **as_json(photos[:1])).status_code == 200
    time.sleep(0.1)
    assert {"classify", "prepare", "RequestLog.__call__"} <= entered
    assert len(entered - {"ModelClient._watch", "ModelClient._tell"}) <= 12, sorted(entered)


# ---------------------------------------------------------------------- who may call


def test_keys(guarded: TestClient, client: Any, photos: list[bytes]) -> None:
    stranger = TestClient(guarded.app, base_url="http://localhost")
    stranger.portal = guarded.portal
    for path in ("/healthz", "/readyz", "/openapi.json", "/", "/static/page.js"):
        assert stranger.get(path).status_code == 200, path
    for path in ("/v1/info", "/v1/models", "/metrics"):
        refused = stranger.get(path)
        check_error(refused, 401, "missing")
        assert refused.headers["www-authenticate"].startswith("Bearer")
        assert guarded.get(path).status_code == 200
    check_error(stranger.post("/v1/classify", **as_form(photos[:1])), 401, "API key")
    for headers in ({"authorization": "Bearer wrong"}, {"x-api-key": "wrong"}, {"authorization": f"Basic {KEYS[0]}"}):
        check_error(stranger.get("/v1/info", headers=headers), 401)
    assert stranger.get("/v1/info", headers={"x-api-key": KEYS[0]}).status_code == 200
    check_error(client.get("/metrics"), 403, "--diagnostics")


def test_other_hosts_and_pages_of_other_sites(client: Any, guarded: Any, photos: list[bytes]) -> None:
    """Without keys: DNS rebinding reaches a service under the attacker's name, and a form of any page can be sent."""
    for host, status in (("localhost", 200), ("127.0.0.1:8000", 200), ("evil.example", 400)):
        assert client.get("/v1/info", headers={"host": host}).status_code == status
        assert guarded.get("/v1/info", headers={"host": host}).status_code == 200, "its callers prove who they are"
    for site, status in (("same-origin", 200), ("none", 200), ("cross-site", 403), ("same-site", 403)):
        answer = client.post("/v1/classify", **as_form(photos[:1]), headers={"sec-fetch-site": site})
        assert answer.status_code == status
    for origin, status in (("http://localhost", 200), ("http://evil.example", 403), ("null", 403)):
        answer = client.post("/v1/classify", **as_form(photos[:1]), headers={"origin": origin})
        assert answer.status_code == status, "over plain HTTP a browser sends the origin alone"


def test_sizes(guarded: Any, photos: list[bytes]) -> None:
    check_error(guarded.post("/v1/classify", **as_form([bytes(70_000)])), 413, "limit is 60,000")
    endless = (bytes(1000) for _ in range(100))
    chunked = guarded.post("/v1/classify", content=endless, headers={"content-type": "application/json"})
    check_error(chunked, 413, "limit is 60,000")
    for write in (as_json, as_form):
        many = guarded.post("/v1/classify", **write([photos[0]] * 9))
        check_error(many, 422, "images has 9 images, at most 8")
        assert many.json()["error"]["type"] == "invalid_request"
    wide = guarded.post("/v1/classify", **as_form([saved(Image.new("RGB", (101, 100)), "PNG")]))
    check_error(wide, 422, "images[0]", "has 10,100 pixels", "limit is 10,000")
    check_error(guarded.post("/v1/classify", **as_form(photos[:1], labels="cat, dog")), 422, "its own only")
    assert guarded.post("/v1/classify", **as_form(photos[:1])).status_code == 200, "bodies are forgotten"
    assert guarded.app.state.service.buffered == 0


def test_slow_bodies_slow_answers_and_callers_that_leave_end(
    client: Any, photos: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand, because the test client sends whole bodies and stays."""
    monkeypatch.setattr(reading, "_BODY_SECONDS", 0.2)
    service = client.app.state.service
    monkeypatch.setattr(service, "settings", service.settings.model_copy(update={"deadline": 0.2}))
    monkeypatch.setattr(service.client, "ask", lambda *_, **__: asyncio.sleep(60))
    body = json.dumps(as_json(photos[:1])["json"]).encode()

    async def answer(*, ends: bool, leaves: bool = False) -> list[dict[str, Any]]:
        async def receive() -> dict[str, Any]:
            if arrived.is_set():
                await asyncio.sleep(0 if leaves else 60)
                return {"type": "http.disconnect"}
            arrived.set()
            return {"type": "http.request", "body": body, "more_body": not ends}

        async def send(message: Any) -> None:
            sent.append(message)

        arrived, sent = asyncio.Event(), list[Any]()
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/classify", "headers": headers, "query_string": b""}
        await client.app(scope, receive, send)
        return sent

    slow, late = (client.portal.call(lambda ends=ends: answer(ends=ends)) for ends in (False, True))
    for sent, status, line in ((slow, 408, "came within 0.2 s"), (late, 503, "not ready within 0.2 s")):
        assert sent[0]["status"] == status
        assert line in json.loads(sent[1]["body"])["error"]["message"]
    for ends in (False, True):
        assert client.portal.call(lambda ends=ends: answer(ends=ends, leaves=True)) == []
    assert service.buffered == 0


# ---------------------------------------------------------------------- pages, headers, wrong requests


def test_headers_and_unknown_routes(client: Any) -> None:
    check_error(client.get("/nothing"), 404, "/docs")
    check_error(client.get("/static/../settings.py"), 404)
    wrong = client.get("/v1/classify")
    check_error(wrong, 405, "Allow")
    assert wrong.headers["allow"] == "POST"
    for answer in (wrong, client.get("/healthz")):
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"
    for path in ("/", "/docs"):
        assert client.get(path).headers["content-type"].startswith("text/html")
        policy = client.get(path).headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"colour": "red"}, ("colour", "images, labels")),
        ({"top_k": "many"}, ("top_k is 'many'",)),
        ({"labels": ["cat", "cat"]}, ("'cat'", "2 times")),
        ({"labels": ["cat", " "]}, ("blank",)),
        ({"labels": []}, ("labels is a list", "at least 1 item")),
        ({"labels": ["a", "x" * 101]}, ("labels[1] is 'xx", "at most 100 characters")),
        ({"labels": [f"label {i}" for i in range(1001)]}, ("1001 prompts", "limit is 1000")),
        ({"model": "gpt"}, ("'gpt'",)),
        ({"images": ["%%%"]}, ("images[0]", "base64")),
        ({"images": [7]}, ("images[0] is 7", "base64")),
        ({"images": ["%%%", "bm8gcGhvdG8="]}, ("images[0]", "base64", "(2 wrong of 2)")),
        ({"images": [""]}, ("images[0] is empty",)),
        ({"images": ["bm8gcGhvdG8="]}, ("images[0] is not an image we read",)),
        ({"images": ["https://example.org/cat.jpg"]}, ("images[0]", "not fetched")),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_wrong_fields_get_one_clear_line(client: Any, fields: dict[str, Any], words: tuple[str, ...]) -> None:
    check_error(client.post("/v1/classify", json=as_json([png(0)])["json"] | fields), 422, *words)


def test_wrong_bodies_get_one_clear_line(client: Any, photos: list[bytes]) -> None:
    def post(content: bytes, kind: str, **headers: str) -> Any:
        return client.post("/v1/classify", content=content, headers={"content-type": kind, **headers})

    form = "multipart/form-data; boundary=x"
    part = b'--x\r\ncontent-disposition: form-data; name="images"; filename="a"\r\n\r\n' + photos[0]
    assert post(part + b"\r\n--x--\r\n", form).status_code == 200
    for content, kind in ((b"nonsense", form), (b"", "multipart/form-data")):
        assert post(content, kind).status_code in (400, 422)
    check_error(client.post("/v1/classify", **as_form([b""])), 422, "images[0]")
    check_error(
        client.post("/v1/classify", files=[("photo", ("x", photos[0]))]),
        422,
        "images: Field required",
        "images, labels",
    )
    check_error(client.post("/v1/classify", **as_form(photos[:1], labels="[cat")), 422, "JSON list")
    check_error(client.post("/v1/classify", **as_form(photos[:1], top_k="x")), 422, "top_k")
    check_error(post(gzip.compress(b"{}"), "application/json", **{"content-encoding": "gzip"}), 415, "'gzip'")
    check_error(client.post("/v1/classify", json={}), 422, "images: Field required")
    check_error(client.post("/v1/classify", json=[1]), 422, "body is a list")
    for other in ("image/png", "text/plain", "application/x-www-form-urlencoded", ""):
        check_error(post(photos[0], other), 415, "application/json or multipart/form-data")
    for body in (b"", b"{", b"\xff\xfe", b'{"images": ["\\ud800"]}', b"[" * 90_000):
        check_error(post(body, "application/json"), 400)
    check_error(post(b'{"images": [' + b"0," * 300_000 + b"0]}", "application/json"), 422, "values; the limit is")
