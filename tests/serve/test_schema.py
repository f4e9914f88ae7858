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
from serve_client import as_json, png

pytestmark = pytest.mark.process

CHECKS = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]


SEARCH = settings(
    max_examples=12,
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
                case.body["images"] = [as_json([png(0)])["json"]["images"][0]]
            response = case.call(timeout=30)
            statuses[response.status_code] += 1
            assert response.status_code < 500 or response.status_code == 503
            case.validate_response(response, checks=CHECKS)

        check()
    assert sum(statuses.values()) >= 20
    assert mode is GenerationMode.NEGATIVE or statuses[200] >= 5, statuses
    assert set(statuses) - {200}, "something must have been refused"


def test_malformed_requests_are_refused_and_the_server_goes_on(server: Any) -> None:
    statuses: Counter[int] = Counter()
    wrong = []
    for case in serve_fuzz.cases(240, seed=1):
        status, body = serve_fuzz.send(server.url, case)
        statuses[status] += 1
        if (line := serve_fuzz.check(case, status, body)) is not None:
            wrong.append(line)
    assert not wrong
    assert {200, 400, 404, 405, 415, 422} <= set(statuses)
    assert statuses[0] < 24, "nearly every request is answered"
    assert server.client.get("/readyz").status_code == 200
