"""Generated requests: from the OpenAPI document, and malformed ones from benchmarks/serve_fuzz.py."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import schemathesis
import serve_fuzz
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi import checks

from react_clip.serve.pages import example_image

CHECKS = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]


SEARCH = settings(
    max_examples=25,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_generated_requests_get_documented_answers(server: Any, mode: GenerationMode) -> None:
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    statuses: Counter[int] = Counter()
    for loaded in document.get_all_operations():
        operation = loaded.ok()
        if mode is GenerationMode.NEGATIVE and operation.method == "get":
            continue

        @SEARCH
        @seed(0)
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case: Any) -> None:
            if (
                mode is GenerationMode.POSITIVE
                and isinstance(case.body, dict)
                and case.media_type == "application/json"
            ):
                # No generator finds a valid photo; with one in place the other fields are reached too.
                case.body["images"] = [example_image()]
            response = case.call(timeout=30)
            statuses[response.status_code] += 1
            assert response.status_code < 500 or response.status_code == 503
            case.validate_response(response, checks=CHECKS)

        check()
    assert sum(statuses.values()) >= 40
    assert mode is GenerationMode.NEGATIVE or statuses[200] >= 10, statuses
    assert set(statuses) - {200}, "something must have been refused"


def test_the_document_describes_every_route_and_its_examples_work(server: Any) -> None:
    document = server.client.get("/openapi.json").json()
    paths = document["paths"]
    assert set(paths) == {"/v1/classify", "/v1/embed", "/v1/info", "/v1/models", "/healthz", "/readyz"}
    for path in ("/v1/classify", "/v1/embed"):
        content = paths[path]["post"]["requestBody"]["content"]
        assert set(content) == {"application/json", "multipart/form-data"}
        example = content["application/json"]["example"]
        assert server.client.post(path, json=example).status_code == 200, path
        assert set(paths[path]["post"]["responses"]) >= {"200", "400", "401", "408", "413", "415", "422", "503"}


def test_malformed_requests_are_refused_and_the_server_goes_on(server: Any) -> None:
    statuses: Counter[int] = Counter()
    wrong = []
    for case in serve_fuzz.cases(360, seed=1):
        status, body = serve_fuzz.send(server.url, case)
        statuses[status] += 1
        if (line := serve_fuzz.check(case, status, body)) is not None:
            wrong.append(line)
    assert not wrong
    assert {200, 400, 404, 405, 415, 422} <= set(statuses)
    assert statuses[0] < 36, "nearly every request is answered"
    assert server.client.get("/readyz").status_code == 200
