"""What belongs to a call besides its photos: ids, log lines, pages of other sites, requests a minute, HEAD."""

from __future__ import annotations

import json
import logging
from datetime import datetime, timedelta
from typing import Any

import pytest
from serve_client import KEYS, as_form, as_json, check_error, png

from react_clip.serve.log import JsonLines

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_request_has_an_id(client: Any) -> None:
    sent = {"x-request-id": "order-7.photo_3", "traceparent": TRACE}
    answer = client.get("/healthz", headers=sent)
    assert {name: answer.headers[name] for name in sent} == sent
    made = set()
    for wrong in ({}, {"x-request-id": "a" * 65}, {"x-request-id": "two words"}, {"traceparent": "00-xyz"}):
        answer = client.get("/nothing", headers=wrong)
        made.add(answer.headers["x-request-id"])
        assert "traceparent" not in answer.headers
    assert len(made) == 4
    assert all(len(name) == 32 and int(name, 16) for name in made)


def test_a_line_says_what_a_request_was(client: Any, photos: list[bytes], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "react_clip.serve")
    headers = {"x-request-id": "one", "traceparent": TRACE, "authorization": "Bearer private"}
    client.post("/v1/classify?name=private", **as_form(photos), headers=headers)
    client.post("/v1/classify", json={}, headers={"x-request-id": "two"})
    client.get("/private", headers={"x-request-id": "three"})
    lines = [json.loads(JsonLines().format(record)) for record in caplog.records]
    assert datetime.fromisoformat(lines[0]["time"]).utcoffset() == timedelta(0)
    good, empty, unknown = ({name: line for name, line in each.items() if name != "time"} for each in lines)
    assert good.pop("ms") > good.pop("wait_ms") >= 0
    assert good.pop("passes") >= len(photos)
    assert 0 < good.pop("changed") <= good.pop("gate_open") < len(photos)
    assert good == {
        **{"level": "info", "id": "one", "method": "POST", "route": "/v1/classify", "status": 200},
        **{"images": len(photos), "trace": TRACE.split("-")[1]},
    }
    assert (empty["id"], empty["status"], empty["error"]) == ("two", 422, "invalid_request")
    assert (unknown["id"], unknown["route"], unknown["error"]) == ("three", "unmatched", "not_found")
    texts = [record.getMessage() for record in caplog.records]
    assert texts[2].startswith("GET unmatched 404 ")
    assert texts[2].endswith(" ms three")
    assert not any("private" in text for text in (*texts, json.dumps(lines)))


def test_head_is_get_without_a_body(client: Any) -> None:
    for path in ("/healthz", "/readyz", "/", "/docs", "/openapi.json", "/v1/info", "/v1/models", "/static/page.js"):
        head, get = client.head(path), client.get(path)
        assert (head.status_code, head.content) == (200, b""), path
        assert head.headers["content-length"] == get.headers["content-length"]
    wrong = client.head("/v1/classify")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")


def test_pages_of_other_sites_need_leave(start: Any, photos: list[bytes]) -> None:
    origin = "https://shop.example"
    client = start(cors_origin=[origin])
    sent = {"origin": origin, "sec-fetch-site": "cross-site"}
    asked = {**sent, "access-control-request-method": "POST", "access-control-request-headers": "x-api-key"}
    assert client.options("/v1/classify", headers=asked).headers["access-control-allow-origin"] == origin
    answer = client.post("/v1/classify", **as_form(photos[:1]), headers=sent)
    assert answer.status_code == 200
    refused = client.post("/v1/classify", json={}, headers=sent)
    for each in (answer, refused):
        assert each.headers["access-control-allow-origin"] == origin
        assert "x-request-id" in each.headers["access-control-expose-headers"].lower()
    other = sent | {"origin": "https://evil.example"}
    answer = client.post("/v1/classify", **as_form(photos[:1]), headers=other)
    check_error(answer, 403, "--cors-origin")
    assert "access-control-allow-origin" not in answer.headers


def test_requests_a_minute(start: Any, photos: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    client = start(rate_limit=2, keys=KEYS)
    first, second = ({"authorization": f"Bearer {key}"} for key in KEYS)
    statuses = [client.post("/v1/classify", **as_form(photos[:1]), headers=first).status_code for _ in range(3)]
    assert statuses == [200, 200, 429]
    refused = client.post("/v1/embeddings", json={}, headers=first)
    check_error(refused, 429, "2 requests a minute are allowed")
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert client.post("/v1/classify", **as_form(photos[:1]), headers=second).status_code == 200
    assert client.get("/v1/info", headers=first).status_code == 200
    rates = client.app.state.service.rates
    monkeypatch.setattr(rates, "_end", 0.0)
    assert client.post("/v1/classify", **as_form(photos[:1]), headers=first).status_code == 200, "a minute later"


@pytest.mark.parametrize("write", [as_json, as_form])
def test_a_bad_image_fails_only_itself(client: Any, photos: list[bytes], write: Any) -> None:
    images = [*photos[:2], b"no photo", *photos[2:4], png(0)[:-40]]
    alone = client.post("/v1/classify", **write(photos[:4])).json()["results"]
    answer = client.post("/v1/classify", **write(images))
    assert answer.status_code == 200
    results = answer.json()["results"]
    assert [result["index"] for result in results] == list(range(6))
    assert [result["label"] for result in results if result["error"] is None] == [each["label"] for each in alone]
    assert [index for index, result in enumerate(results) if result["error"]] == [2, 5]
    assert results[2]["error"].startswith("images[2] is not an image we read")
    assert "images[5] cannot be decoded" in results[5]["error"]
    assert (results[2]["label"], results[2]["answers"]) == (None, [])
    check_error(client.post("/v1/embeddings", **write([*images[:2], images[5]])), 400, "input[2] cannot be decoded")
