"""A few hundred of the malformed requests of benchmarks/serve_fuzz.py against the real server."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from typing import Any


def load_fuzz() -> Any:
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "serve_fuzz.py"
    spec = importlib.util.spec_from_file_location("serve_fuzz", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_malformed_requests_are_refused_and_nothing_breaks(server: Any) -> None:
    fuzz = load_fuzz()
    statuses: Counter[int] = Counter()
    wrong = []
    for case in fuzz.cases(360, seed=1):
        status, body = fuzz.send(server.url, case)
        statuses[status] += 1
        if (line := fuzz.check(case, status, body)) is not None:
            wrong.append(line)
    assert not wrong
    assert {200, 400, 404, 405, 415, 422} <= set(statuses)
    assert statuses[0] < 36, "nearly everything is answered"
    assert server.client.get("/readyz").status_code == 200
