"""Every endpoint of a real server, and that its answers are the library's."""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

import react_clip as rc
from react_clip.serve import pages
from react_clip.serve.app import create_app
from react_clip.serve.classes import ClassList
from react_clip.serve.engine import Engine
from react_clip.serve.settings import Settings

Direct = Callable[..., rc.Defended]


def as_json(photos: list[bytes], **fields: Any) -> dict[str, Any]:
    return {"json": {"images": [base64.b64encode(photo).decode() for photo in photos], **fields}}


def as_form(photos: list[bytes], **fields: Any) -> dict[str, Any]:
    return {"files": [("images", ("photo", photo)) for photo in photos], "data": fields}


def check_error(answer: httpx.Response, status: int, *words: str) -> None:
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"error"}
    assert set(answer.json()["error"]) == {"message", "type", "field"}
    message = answer.json()["error"]["message"]
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("write", [as_json, as_form])
def test_classify_says_what_the_library_says(server: Any, direct: Direct, photos: list[bytes], write: Any) -> None:
    answer = server.client.post("/v1/classify", **write(photos, top_k=3))
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == server.client.get("/v1/models").json()["data"][0]["id"]
    expected = direct(photos)
    results = answer.json()["results"]
    assert [result["index"] for result in results] == list(range(len(photos)))
    assert [result["label"] for result in results] == expected.names
    for result, probs in zip(results, expected.probs, strict=True):
        found = {scored["label"]: scored["probability"] for scored in result["answers"]}
        assert torch.allclose(torch.tensor([found[name] for name in expected.class_names]), probs, atol=1e-3)
        assert result["probability"] == result["answers"][0]["probability"] == max(found.values())
        assert set(result) == {"index", "label", "probability", "answers"}, "no diagnostics unless asked for"


def test_the_same_image_gets_the_same_answer(server: Any, photos: list[bytes]) -> None:
    first, second = (server.client.post("/v1/embed", **as_json(photos[:1])).json() for _ in range(2))
    assert first == second


def test_labels_of_a_request(server: Any, direct: Direct, photos: list[bytes]) -> None:
    names = ("zebra", "a red car", "Über-Kater")
    for write, labels in ((as_json, list(names)), (as_form, ", ".join(names))):
        answer = server.client.post("/v1/classify", **write(photos[:4], labels=labels, top_k=1))
        assert [result["label"] for result in answer.json()["results"]] == direct(photos[:4], names).names
        assert all(len(result["answers"]) == 1 for result in answer.json()["results"])
    templates = ["a sketch of a {}.", "{} at night"]
    answer = server.client.post("/v1/classify", **as_json(photos[:4], labels=list(names), templates=templates))
    assert answer.status_code == 200


@pytest.mark.parametrize("write", [as_json, as_form])
def test_embed_speaks_like_openai(server: Any, direct: Direct, photos: list[bytes], write: Any) -> None:
    numbers = server.client.post("/v1/embed", **write(photos)).json()
    text = server.client.post("/v1/embed", **write(photos, encoding_format="base64")).json()
    assert numbers["object"] == "list"
    assert numbers["usage"] == {"prompt_tokens": 0, "total_tokens": 0, "images": len(photos)}
    features = torch.tensor([row["embedding"] for row in numbers["data"]])
    assert torch.allclose(features, direct(photos).features, atol=1e-5)
    for row, feature in zip(text["data"], features, strict=True):
        assert row["object"] == "embedding"
        assert torch.allclose(
            torch.from_numpy(np.frombuffer(base64.b64decode(row["embedding"]), "<f4").copy()), feature
        )
    renamed = {"input": as_json(photos[:1])["json"]["images"], "model": numbers["model"]}
    assert server.client.post("/v1/embed", json=renamed).json()["data"][0] == numbers["data"][0]


def test_data_uris_are_read_and_addresses_are_not(server: Any, photos: list[bytes]) -> None:
    encoded = base64.b64encode(photos[0]).decode()
    assert server.client.post("/v1/classify", json={"images": [f"data:image/png;base64,{encoded}"]}).status_code == 200
    for url in ("http://127.0.0.1:1/x.png", "https://example.org/cat.jpg", "file:///etc/passwd"):
        check_error(server.client.post("/v1/classify", json={"images": [url]}), 422, "images[0]", "fetches nothing")


def test_probes_info_and_models(server: Any) -> None:
    assert server.client.get("/healthz").json() == {"status": "alive"}
    assert server.client.get("/readyz").json() == {"status": "ready"}
    info = server.client.get("/v1/info").json()
    assert info["labels"] == {"preset": ["cat", "dog", "teapot"], "free": True, "source": "text", "templates": True}
    assert info["defence"]["tau"] == 1.48
    assert info["defence"]["sigma"]["least"] == pytest.approx(0.03)
    assert info["defence"]["passes"] == {"least": 3, "most": 14}
    assert (info["diagnostics"], info["demo"], info["defence"]["constant_work"]) == (False, None, False)
    assert info["limits"]["images"] == 16
    assert "/" not in info["model"], "folders of the machine are nobody's business"


def test_metrics_count(server: Any, photos: list[bytes]) -> None:
    names = ("images_total", "encoder_passes_total", "gate_opened_total", "batch_images_count")
    before = {name: server.metric(f"react_clip_{name}") for name in names}
    server.client.post("/v1/classify", **as_json(photos))
    after = {name: server.metric(f"react_clip_{name}") - before[name] for name in names}
    assert after["images_total"] == len(photos)
    assert 3 * len(photos) <= after["encoder_passes_total"] <= 14 * len(photos)
    assert 0 <= after["gate_opened_total"] <= len(photos)
    assert after["batch_images_count"] >= 1
    text = server.client.get("/metrics").text
    assert 'react_clip_requests_total{method="POST",route="/v1/classify",status="200"}' in text
    for name in ("react_clip_queue_images", "react_clip_request_seconds_bucket", "react_clip_rejected_total"):
        assert name in text


def test_pages_need_nothing_from_elsewhere(server: Any) -> None:
    docs = server.client.get("/docs")
    assert "POST /v1/classify" in docs.text
    assert not re.search(r"(src|href)=.?https?:", docs.text)
    assert "default-src 'none'" in docs.headers["content-security-policy"]
    front = server.client.get("/")
    if pages.PAGE.is_file():
        assert front.headers["content-type"].startswith("text/html")
    else:
        check_error(front, 404, "/docs")


def test_a_page_is_made_whole_and_only_its_own_scripts_run(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(
        '<link rel="stylesheet" href="page.css"><p>hi<script defer src="page.js"></script>'
    )
    (tmp_path / "page.css").write_text("p{color:red}")
    (tmp_path / "page.js").write_text("alert('\\1 \\n')")
    page = pages.load_page(tmp_path / "page.html")
    assert page is not None
    assert page.html == "<style>\np{color:red}</style><p>hi<script>\nalert('\\1 \\n')</script>"
    policy = page.headers["content-security-policy"]
    assert policy.count("'sha256-") == 2
    assert "unsafe" not in policy
    assert pages.load_page(tmp_path / "none.html") is None


def test_headers_and_unknown_routes(server: Any) -> None:
    check_error(server.client.get("/nothing"), 404, "/docs")
    wrong = server.client.get("/v1/classify")
    check_error(wrong, 405, "GET", "POST")
    assert wrong.headers["allow"] == "POST"
    check_error(server.client.post("/v1/demo/attack", json={}), 404)
    for answer in (wrong, server.client.get("/healthz"), server.client.get("/docs")):
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert "server" not in answer.headers


def test_wrong_fields_get_one_clear_line(server: Any, photos: list[bytes]) -> None:
    def post(**fields: Any) -> httpx.Response:
        return server.client.post("/v1/classify", **as_json(photos[:1], **fields))

    check_error(server.client.post("/v1/classify", json={}), 422, "images is missing")
    check_error(server.client.post("/v1/classify", json={"images": []}), 422, "images")
    check_error(server.client.post("/v1/classify", json=[1]), 422, "list")
    check_error(server.client.post("/v1/classify", json={"images": ["%%%"]}), 422, "images[0]", "base64")
    check_error(post(colour="red"), 422, "'colour'", "images, labels")
    check_error(post(top_k=0), 422, "top_k is 0")
    check_error(post(top_k="many"), 422, "top_k is 'many'")
    check_error(post(labels=["cat", "cat"]), 422, "'cat'", "2 times")
    check_error(post(labels=["cat", " "]), 422, "blank")
    check_error(post(labels=["x" * 101]), 422, "101 characters", "limit is 100")
    check_error(post(labels=[f"label {i}" for i in range(1001)]), 422, "1001 prompts", "limit is 1000")
    check_error(post(templates=["a {}"]), 422, "without labels")
    check_error(post(labels=["cat"], templates=["a {} {0.__class__} {}"]), 422, "exactly one {}")
    check_error(post(model="gpt"), 422, "'gpt'")
    check_error(server.client.post("/v1/classify", **as_form(photos[:1], top_k="x")), 422, "top_k")
    check_error(server.client.post("/v1/embed", **as_json(photos[:1], encoding_format="hex")), 422, "encoding_format")


@pytest.fixture(scope="module")
def demo(launch: Any) -> Any:
    """Diagnostics and demo switched on by environment variables alone."""
    env = {"REACT_CLIP_SERVE_DEMO": "true", "REACT_CLIP_SERVE_CONSTANT_WORK": "1", "REACT_CLIP_SERVE_NAME": "tiny-clip"}
    return launch(env=env)


def test_diagnostics_are_shown_when_enabled(demo: Any, direct: Direct, photos: list[bytes]) -> None:
    results = demo.client.post("/v1/classify", **as_json(photos)).json()["results"]
    expected = direct(photos, guard=rc.ReACT(tau=1.48, lazy=False))
    for i, result in enumerate(results):
        told = result["diagnostics"]
        assert told["gated"] == bool(expected.gated[i]) == (told["score"] >= 1.48)
        for name, value in (("r", expected.drift), ("J", expected.instability), ("sigma", expected.sigma)):
            assert told[name] == pytest.approx(float(value[i]), abs=1e-3)
    assert len({result["diagnostics"]["gated"] for result in results}) == 2, "the photos must show both cases"


def test_constant_work_spends_the_same_on_every_image(demo: Any, direct: Direct, photos: list[bytes]) -> None:
    results = demo.client.post("/v1/classify", **as_json(photos)).json()["results"]
    assert {result["diagnostics"]["passes"] for result in results} == {14}
    assert [result["label"] for result in results] == direct(photos).names, "and gives the answers of lazy work"


def test_the_factory_takes_an_engine_and_an_attack(encoder: rc.Encoder, photos: list[bytes]) -> None:
    preset = ClassList.of(rc.ZeroShotClassifier(encoder, ["cat", "dog"]))
    engine = Engine(encoder, rc.ReACT(), preset, secret=b"0123456789abcdef")
    engine.start()

    def invert(pixels: torch.Tensor, classes: ClassList, label: int, eps: float) -> torch.Tensor:
        assert classes.names == ("cat", "dog")
        assert eps == pytest.approx(2 / 255)
        return (pixels + eps * (1 - 2 * label)).clamp(0, 1)

    async def ask() -> Any:
        transport = httpx.ASGITransport(create_app(engine, Settings(demo=True), invert))
        async with httpx.AsyncClient(transport=transport, base_url="http://inside") as client:
            return (await client.post("/v1/demo/attack", **as_json(photos[:1], eps=2))).json()

    told = asyncio.run(ask())
    engine.stop()
    assert told["amplification"] == pytest.approx(127 / 2)
    assert told["attacked"]["image"] != told["clean"]["image"]


def test_the_demo_attacks_a_photo(demo: Any, photos: list[bytes]) -> None:
    info = demo.client.get("/v1/info").json()
    assert info["model"] == "tiny-clip"
    assert info["demo"] == {"eps_least": 0, "eps_most": 16}
    told = demo.client.post("/v1/demo/attack", **as_form(photos[1:2], eps="8", labels="cat,zebra,boat")).json()
    assert told["attacked_label"] == told["clean"]["plain"][0]["label"]
    assert told["attacked"]["plain"][0]["label"] != told["attacked_label"]
    for picture in (told["clean"]["image"], told["attacked"]["image"], told["perturbation"]):
        assert base64.b64decode(picture.removeprefix("data:image/png;base64,")).startswith(b"\x89PNG")
    assert set(told["attacked"]["diagnostics"]) >= {"r", "J", "score", "sigma", "gated", "passes"}
    check_error(demo.client.get("/metrics"), 403, "--open-metrics")
    still = demo.client.post("/v1/demo/attack", **as_json(photos[1:2], eps=0)).json()
    assert still["attacked"] == still["clean"]
    check_error(demo.client.post("/v1/demo/attack", **as_json(photos[:1], eps=17)), 422, "eps")
    check_error(demo.client.post("/v1/demo/attack", **as_json(photos[:2])), 422, "images")
