"""Every endpoint of a real server: its answers are the library's, and wrong requests get one clear line."""

from __future__ import annotations

import base64
import html
import io
import re
import struct
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from serve_client import SECOND_LOOK, as_form, as_json, check_error

import react_clip as rc
from react_clip.defenses.second_look import CORRECT, KEEP, SecondLooked
from react_clip.preprocess import DEFAULT_LIMITS
from react_clip.serve import pages, responses

Direct = Callable[..., rc.Defended]


@pytest.mark.parametrize("write", [as_json, as_form])
def test_classify_returns_the_librarys_answers(server: Any, direct: Direct, photos: list[bytes], write: Any) -> None:
    answer = server.client.post("/v1/classify", **write(photos, top_k=3))
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == server.client.get("/v1/models").json()["data"][0]["id"]
    expected = direct(photos)
    results = answer.json()["results"]
    assert [result["index"] for result in results] == list(range(len(photos)))
    assert [result["label"] for result in results] == expected.names
    for result, probs in zip(results, expected.probs, strict=True):
        scores = {scored["label"]: scored["probability"] for scored in result["answers"]}
        assert torch.allclose(torch.tensor([scores[name] for name in expected.class_names]), probs, atol=1e-3)
        assert result["probability"] == result["answers"][0]["probability"] == max(scores.values())
        assert result["diagnostics"] is None, "diagnostics are off by default"


def test_labels_and_templates_of_a_request(server: Any, direct: Direct, photos: list[bytes]) -> None:
    names = ("zebra", "a red car", "Über-Kater")
    for write, labels in ((as_json, list(names)), (as_form, ", ".join(names))):
        answer = server.client.post("/v1/classify", **write(photos[:4], labels=labels, top_k=1))
        assert [result["label"] for result in answer.json()["results"]] == direct(photos[:4], names).names
        assert all(len(result["answers"]) == 1 for result in answer.json()["results"])
    templates = ["a sketch of a {}.", "{} at night"]
    answer = server.client.post("/v1/classify", **as_json(photos[:4], labels=list(names), templates=templates))
    assert answer.status_code == 200


@pytest.mark.parametrize("write", [as_json, as_form])
def test_embed_has_the_shape_of_openai(server: Any, direct: Direct, photos: list[bytes], write: Any) -> None:
    numbers = server.client.post("/v1/embed", **write(photos)).json()
    text = server.client.post("/v1/embed", **write(photos, encoding_format="base64")).json()
    assert numbers["object"] == "list"
    assert numbers["usage"] == {"prompt_tokens": 0, "total_tokens": 0, "images": len(photos)}
    features = torch.tensor([row["embedding"] for row in numbers["data"]])
    assert torch.allclose(features, direct(photos).features, atol=1e-5)
    for row, feature in zip(text["data"], features, strict=True):
        assert row["object"] == "embedding"
        decoded = np.frombuffer(base64.b64decode(row["embedding"]), "<f4").copy()
        assert torch.allclose(torch.from_numpy(decoded), feature)
    renamed = {"input": as_json(photos[:1])["json"]["images"], "model": numbers["model"]}
    first, second = (server.client.post("/v1/embed", json=renamed).json()["data"] for _ in range(2))
    assert first == second, "the same image gets the same answer"
    alone = torch.tensor(first[0]["embedding"])
    assert torch.allclose(alone, features[0], rtol=0, atol=1e-6), "whatever else is in its batch, up to rounding"


def test_data_uris_are_read_and_addresses_are_not(server: Any, photos: list[bytes]) -> None:
    encoded = base64.b64encode(photos[0]).decode()
    assert server.client.post("/v1/classify", json={"images": [f"data:image/png;base64,{encoded}"]}).status_code == 200
    for url in ("http://127.0.0.1:1/x.png", "https://example.org/cat.jpg", "file:///etc/passwd"):
        check_error(server.client.post("/v1/classify", json={"images": [url]}), 422, "images[0]", "fetches nothing")


def test_health_info_and_models(server: Any) -> None:
    assert server.client.get("/healthz").json() == {"status": "alive"}
    assert server.client.get("/readyz").json() == {"status": "ready"}
    info = server.client.get("/v1/info").json()
    assert info["labels"] == {"preset": ["cat", "dog", "teapot"], "free": True, "source": "text", "templates": True}
    assert info["defence"]["tau"] == 1.48
    assert info["defence"]["sigma"]["least"] == pytest.approx(0.03)
    assert info["defence"]["passes"] == {"least": 3, "most": 14}
    assert (info["diagnostics"], info["demo"], info["defence"]["constant_work"]) == (False, None, False)
    assert info["limits"]["images"] == 16
    assert "/" not in info["model"], "the model's folder is not shown to callers"


def test_metrics_count(server: Any, photos: list[bytes]) -> None:
    kept, corrected = (f'images_total{{branch="{branch}"}}' for branch in ("keep", "correct"))
    names = ("images_total", kept, corrected, "encoder_passes_total", "batch_images_count")
    before = {name: server.metric(f"react_clip_{name}") for name in names}
    server.client.post("/v1/classify", **as_json(photos))
    after = {name: server.metric(f"react_clip_{name}") - before[name] for name in names}
    assert after["images_total"] == len(photos)
    assert 3 * len(photos) <= after["encoder_passes_total"] <= 14 * len(photos)
    assert after[kept] > 0
    assert after[corrected] > 0
    assert after[kept] + after[corrected] == len(photos), "ReACT does not blend"
    assert after["batch_images_count"] >= 1
    text = server.client.get("/metrics").text
    assert 'react_clip_requests_total{method="POST",route="/v1/classify",status="200"}' in text
    for name in ("react_clip_queue_images", "react_clip_request_seconds_bucket", "react_clip_rejected_total"):
        assert name in text


def test_concurrent_requests_share_batches_and_keep_their_answers(server: Any, photos: list[bytes]) -> None:
    bodies = [
        as_json([photo], **({"labels": ["zebra", "boat"]} if i % 2 else {}))["json"] for i, photo in enumerate(photos)
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
        assert one["results"][0]["label"] == many["results"][0]["label"]
        assert one["results"][0]["probability"] == pytest.approx(many["results"][0]["probability"], abs=1e-3)


def test_second_look_answers_with_nulls_for_what_only_react_measures(
    second_look: Any, direct: Direct, photos: list[bytes]
) -> None:
    expected = direct(photos, guard=SECOND_LOOK)
    results = second_look.client.post("/v1/classify", **as_json(photos)).json()["results"]
    rows = second_look.client.post("/v1/embed", **as_json(photos)).json()["data"]
    assert [result["label"] for result in results] == expected.names
    assert torch.allclose(torch.tensor([row["embedding"] for row in rows]), expected.features, atol=1e-5)
    for i, shown in enumerate(result["diagnostics"] for result in results):
        assert [shown[name] for name in ("sigma", "drift_low", "drift_high")] == [None] * 3
        assert shown["r"] == shown["score"] == pytest.approx(float(expected.drift[i]), abs=1e-4)
        assert (shown["gated"], shown["passes"]) == (bool(expected.gated[i]), float(expected.passes[i]))
        assert shown["gated"] == rows[i]["diagnostics"]["gated"]
    info = second_look.client.get("/v1/info").json()["defence"]
    assert (info["name"], info["tau"], info["passes"]) == ("second_look", 0.27, {"least": 2, "most": 3})
    assert [info[name] for name in ("sigma", "views", "probe_sigma")] == [None] * 3
    assert "the defence is SecondLook; --defense react" in second_look.command.log.read_text()


def test_suspicious_is_told_where_it_is_allowed_and_asked_for(
    second_look: Any, server: Any, direct: Direct, photos: list[bytes]
) -> None:
    expected = direct(photos, guard=SECOND_LOOK)
    assert isinstance(expected, SecondLooked)
    assert set(expected.branch.tolist()) >= {KEEP, CORRECT}, "the photos must show both cases"
    attacked = (expected.branch == CORRECT).tolist()
    for path, write, rows in (("/v1/classify", as_json, "results"), ("/v1/embed", as_form, "data")):
        answer = second_look.client.post(path, **write(photos, suspicious=True)).json()
        assert [row["suspicious"] for row in answer[rows]] == attacked
        unasked = second_look.client.post(path, **write(photos[:1])).json()
        assert unasked[rows][0]["suspicious"] is None
    check_error(server.client.post("/v1/classify", **as_json(photos[:1], suspicious=True)), 422, "--suspicious")
    check_error(
        second_look.client.post("/v1/embed", **as_json(photos[:1], suspicious="yes")), 422, "suspicious is 'yes'"
    )


# ---------------------------------------------------------------------- the demo


def test_diagnostics_and_constant_work(demo: Any, direct: Direct, photos: list[bytes]) -> None:
    results = demo.client.post("/v1/classify", **as_json(photos)).json()["results"]
    expected = direct(photos, guard=rc.ReACT(tau=1.48, lazy=False))
    for i, result in enumerate(results):
        shown = result["diagnostics"]
        assert shown["gated"] == bool(expected.gated[i]) == (shown["score"] >= 1.48)
        assert shown["passes"] == 14, "constant work runs every pass"
        for name, value in (("r", expected.drift), ("J", expected.instability), ("sigma", expected.sigma)):
            assert shown[name] == pytest.approx(float(value[i]), abs=1e-3)
    assert len({result["diagnostics"]["gated"] for result in results}) == 2, "the photos must show both cases"


def test_the_demo_attacks_a_photo(demo: Any, photos: list[bytes]) -> None:
    info = demo.client.get("/v1/info").json()
    assert info["model"] == "tiny-clip"
    assert info["demo"] == {"eps_least": 0, "eps_most": 16}
    answer = demo.client.post("/v1/demo/attack", **as_form(photos[1:2], eps="8", labels="cat,zebra,boat")).json()
    assert answer["attacked_label"] == answer["clean"]["plain"][0]["label"]
    assert answer["attacked"]["plain"][0]["label"] != answer["attacked_label"]
    assert answer["amplification"] == pytest.approx(127 / 8)
    for picture in (answer["clean"]["image"], answer["attacked"]["image"], answer["perturbation"]):
        assert base64.b64decode(picture.removeprefix("data:image/png;base64,")).startswith(b"\x89PNG")
    assert set(answer["attacked"]["diagnostics"]) >= {"r", "J", "score", "sigma", "gated", "passes"}
    check_error(demo.client.get("/metrics"), 403, "--open-metrics")
    unchanged = demo.client.post("/v1/demo/attack", **as_json(photos[1:2], eps=0)).json()
    assert unchanged["attacked"] == unchanged["clean"]
    check_error(demo.client.post("/v1/demo/attack", **as_json(photos[:1], eps=17)), 422, "eps")
    check_error(demo.client.post("/v1/demo/attack", **as_json(photos[:2])), 422, "images")


# ---------------------------------------------------------------------- pages, headers, wrong requests


def test_pages_load_nothing_from_elsewhere(server: Any) -> None:
    for path in ("/", "/docs"):
        page = server.client.get(path)
        assert page.headers["content-type"].startswith("text/html")
        links = re.findall(r'(?:src|href)="([^"#]+)"', page.text)
        assert links
        for link in links:
            assert link == "data:," or server.client.get(f"/{link}").status_code == 200, link
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
    manual = server.client.get("/docs").text
    assert "POST /v1/classify" in manual
    assert f"{server.url}/v1/classify" in manual
    assert "<code>top_k</code><dd>Answers per photo, best first. Default: 5." in manual
    assert html.escape('"label": "cat"') in manual


def test_example_answers_are_answers(server: Any) -> None:
    paths = server.client.get("/openapi.json").json()["paths"]
    models: dict[str, tuple[type[responses.Schema], dict[str, Any]]] = {
        "/v1/classify": (responses.ClassifyResponse, pages.CLASSIFIED),
        "/v1/embed": (responses.EmbedResponse, pages.EMBEDDED),
    }
    for path, (model, example) in models.items():
        answer = paths[path]["post"]["responses"]["200"]["content"]["application/json"]
        assert "schema" in answer
        assert answer["example"].keys() == example.keys()
        assert model.model_validate(example).model_dump() == example


def test_headers_and_unknown_routes(server: Any) -> None:
    check_error(server.client.get("/nothing"), 404, "/docs")
    check_error(server.client.get("/static/../settings.py"), 404)
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
    check_error(server.client.post("/v1/classify", json={"images": [7]}), 422, "images[0] is 7", "base64")
    check_error(server.client.post("/v1/classify", json={"images": [""]}), 422, "empty")
    check_error(post(colour="red"), 422, "'colour'", "images, labels")
    check_error(post(top_k=0), 422, "top_k is 0")
    check_error(post(top_k="many"), 422, "top_k is 'many'")
    check_error(post(labels=["cat", "cat"]), 422, "'cat'", "2 times")
    check_error(post(labels=["cat", " "]), 422, "blank")
    check_error(post(labels=[]), 422, "labels is empty; give at least 1")
    check_error(post(labels=["a", "x" * 101]), 422, "labels[1] has 101 characters", "limit is 100")
    check_error(post(labels=[f"label {i}" for i in range(1001)]), 422, "1001 prompts", "limit is 1000")
    check_error(post(templates=["a {}"]), 422, "without labels")
    check_error(post(labels=["cat"], templates=["a {} {0.__class__} {}"]), 422, "templates[0]", "exactly one {}")
    check_error(post(model="gpt"), 422, "'gpt'")
    check_error(server.client.post("/v1/classify", **as_form(photos[:1], top_k="x")), 422, "top_k")
    check_error(server.client.post("/v1/embed", **as_json(photos[:1], encoding_format="hex")), 422, "encoding_format")


def test_wrong_forms_get_one_clear_line(server: Any, photos: list[bytes]) -> None:
    def post(content: bytes, boundary: str = "; boundary=x") -> httpx.Response:
        headers = {"content-type": f"multipart/form-data{boundary}"}
        return server.client.post("/v1/classify", content=content, headers=headers)

    part = b'--x\r\ncontent-disposition: form-data; name="images"; filename="a"\r\n\r\n' + photos[0]
    assert post(part + b"\r\n--x--\r\n").status_code == 200
    check_error(post(part), 400, "cut short")
    check_error(post(part + b"\r\n" + part), 400, "cut short")
    check_error(post(b"--x\r\n"), 400, "multipart")
    check_error(post(b"nonsense"), 400, "multipart")
    check_error(post(b"--x\r\ncontent-disposition: form-data\r\n\r\n1\r\n--x--\r\n"), 400, '"name"')
    check_error(post(b"", ""), 400, "boundary")
    check_error(server.client.post("/v1/classify", **as_form([b""])), 415, "images[0]")
    check_error(server.client.post("/v1/classify", files=[("photo", ("x", photos[0]))]), 422, "images is missing")
    check_error(server.client.post("/v1/classify", **as_form([photos[0]] * 17)), 400, "more than 16 files")
    check_error(
        server.client.post("/v1/classify", **as_form(photos[:1], labels="," * 500_000)),
        400,
        "'labels' has more than 402,000 bytes",
    )
    many = {"files": [("templates", (None, "{}"))] * 1200}
    check_error(server.client.post("/v1/classify", **many), 400, "more than 1,100 fields")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"\xff\xfe", 400),
        (b'{"images": ["\\ud800"]}', 400),
        (b"[" * 90_000, 400),
        (b'{"top_k": ' + b"9" * 5000 + b"}", 400),
        (b'{"images": NaN}', 422),
        (b'{"images": {"a": 1}}', 422),
        (b'{"images": ["aaaa"], "top_k": 1e999}', 422),
        (b'{"images": ["aaaa"], "top_k": true}', 422),
        (b'{"images": [' + b"0," * 90_000 + b"0]}", 422),
        (b'{"images": [' + b"0," * 300_000 + b"0]}", 422),
    ],
)
def test_odd_json(server: Any, body: bytes, status: int) -> None:
    answer = server.client.post("/v1/classify", content=body, headers={"content-type": "application/json"})
    check_error(answer, status)


def test_other_media_types(server: Any, photos: list[bytes]) -> None:
    for kind in ("image/png", "text/plain", "application/x-www-form-urlencoded", ""):
        answer = server.client.post("/v1/classify", content=photos[0], headers={"content-type": kind})
        check_error(answer, 415, "application/json or multipart/form-data")


def saved(kind: str) -> bytes:
    stream = io.BytesIO()
    Image.effect_noise((90, 90), 80).save(stream, kind)
    return stream.getvalue()


@pytest.mark.parametrize("kind", DEFAULT_LIMITS.formats)
def test_every_format_of_the_library_is_read(server: Any, guarded: Any, direct: Direct, kind: str) -> None:
    photo = saved(kind)  # of random pixels
    [result] = server.client.post("/v1/classify", **as_form([photo])).json()["results"]
    assert result["label"] == direct([photo]).names[0]
    large = io.BytesIO()
    Image.new("L", (200, 100)).save(large, kind)
    answer = guarded.client.post("/v1/classify", **as_form([large.getvalue()]))
    check_error(answer, 422, "images[0] has 200 x 100 = 20,000 pixels; the limit is 10,000")
    assert f"image/{kind.lower()}" in server.client.get("/v1/info").json()["formats"]


def bomb() -> bytes:
    """The start of a PNG file that claims 30,000 x 30,000 pixels."""
    header = b"IHDR" + struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (saved("JPEG")[:400], 422),
        (bomb(), 422),
        (saved("TIFF")[:400], 422),
        (saved("PPM"), 415),
        (b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>', 415),
    ],
    ids=["cut jpeg", "bomb", "cut tiff", "ppm", "svg"],
)
def test_damaged_images(server: Any, data: bytes, status: int) -> None:
    check_error(server.client.post("/v1/classify", **as_form([data])), status, "images[0]")
    check_error(server.client.post("/v1/embed", **as_json([data])), status, "images[0]")
