"""Flags, environment variables, secrets and keys."""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path

import pytest

from react_clip import ReactClipError
from react_clip.cli import main, parse_args
from react_clip.cli.serve import _read_switches
from react_clip.serve.credentials import read_keys, read_secret
from react_clip.serve.settings import Settings, variable


def parsed(*flags: str) -> argparse.Namespace:
    args = parse_args(["serve", *flags])
    _read_switches(args)
    return args


def test_every_flag_is_an_environment_variable_and_help_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = re.sub(r"\s+", "", capsys.readouterr().out)
    names = [*(row.name for row in dataclasses.fields(Settings)), "model", "labels", "template", "config", "quiet"]
    for name in names:
        assert f"--{name.replace('_', '-')}" in text
        assert f"[${variable(name)}]" in text


def test_variables_equal_flags_and_flags_win(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = parsed(
        "--port", "9", "--max-wait", "1.5", "--demo", "--labels", "a, b", "--template", "x {}", "--template", "y {}"
    )
    given = {"PORT": "9", "MAX_WAIT": "1.5", "DEMO": "yes", "LABELS": "a, b", "TEMPLATE": "x {}\ny {}", "QUIET": "0"}
    for name, value in given.items():
        monkeypatch.setenv(f"REACT_CLIP_SERVE_{name}", value)
    assert vars(parsed()) == vars(flags)
    assert parsed("--port", "10").port == 10


def test_bad_variables_are_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("REACT_CLIP_SERVE_DEMO", "perhaps")
    assert main(["serve"]) == 2
    assert capsys.readouterr().err == "react-clip: $REACT_CLIP_SERVE_DEMO is 'perhaps'; write 1 or 0\n"


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--port", "70000"], "--port is 70000; it must be in 0 ... 65535"),
        (["--batch", "0"], "--batch is 0; it must be >= 1"),
        (["--deadline", "nan"], "--deadline is nan; it must be >= 0.001"),
        (["--queue", "4"], "--queue is 4 but --max-images 16"),
        (["--log-level", "loud"], "--log-level is 'loud'"),
        (["--secret-file", "nowhere"], "nowhere cannot be read"),
        (["--api-key-file", "nowhere"], "nowhere cannot be read"),
        (["--host", "256.0.0.1"], "cannot listen on 256.0.0.1"),
        (["--port", "0", "--model", "no-such-model"], "no model is called 'no-such-model'"),
    ],
)
def test_bad_flags_are_one_line(capsys: pytest.CaptureFixture[str], flags: list[str], line: str) -> None:
    assert main(["serve", "--quiet", *flags]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"react-clip: {line}")
    assert err.count("\n") == 1


def test_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret, made_up = read_secret("")
    assert made_up
    assert len(secret) == 32
    assert read_secret("")[0] != secret
    file = tmp_path / "secret"
    file.write_bytes(b"0123456789abcdef\n")
    assert read_secret(str(file)) == (b"0123456789abcdef", False)
    monkeypatch.setenv("REACT_CLIP_SERVE_SECRET", "fedcba9876543210")
    assert read_secret("") == (b"fedcba9876543210", False)
    file.write_bytes(b"short")
    with pytest.raises(ReactClipError, match="5 bytes; it needs at least 16"):
        read_secret(str(file))


def test_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not read_keys("")
    monkeypatch.setenv("REACT_CLIP_SERVE_API_KEYS", "a-key-of-some-length, another-key-of-length")
    ring = read_keys("")
    assert ring.opens("another-key-of-length")
    assert not ring.opens("")
    file = tmp_path / "keys"
    file.write_text("# nothing\n\n")
    with pytest.raises(ReactClipError, match="holds no API key"):
        read_keys(str(file))
    file.write_text("short\n")
    with pytest.raises(ReactClipError, match="5 characters; keys need at least 16"):
        read_keys(str(file))
