"""Flags, environment variables, secrets and keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from react_clip import ReactClipError
from react_clip.cli import main, parse_args
from react_clip.cli.serve import set_threads, settings_of
from react_clip.serve.settings import Settings, digest, read_keys, read_secret


def parsed(*flags: str) -> Settings:
    return settings_of(parse_args(["serve", *flags]))


def test_variables_equal_flags_and_flags_win(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = parsed(
        *("--port", "9", "--max-wait", "1.5", "--demo", "--labels", "a, b", "--template", "x {}", "--template", "y {}"),
        *("--json", "--labels-file", "names.txt"),
    )
    assert (flags.port, flags.max_wait, flags.demo, flags.template) == (9, 1.5, True, ["x {}", "y {}"])
    given = {"PORT": "9", "MAX_WAIT": "1.5", "DEMO": "yes", "LABELS": "a, b", "TEMPLATE": "x {}\ny {}", "QUIET": "0"}
    given |= {"JSON": "1", "LABELS_FILE": "names.txt", "DEADLINE": ""}
    for name, value in given.items():
        monkeypatch.setenv(f"REACT_CLIP_SERVE_{name}", value)
    assert parsed() == flags
    assert parsed("--port", "10").port == 10


def test_wrong_variables_are_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("REACT_CLIP_SERVE_DEMO", "perhaps")
    assert main(["serve"]) == 2
    assert capsys.readouterr().err.startswith(
        "react-clip: $REACT_CLIP_SERVE_DEMO is 'perhaps'; it should be a valid boo"
    )


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--port", "70000"], "--port is '70000'; it should be less than or equal to 65535"),
        (["--batch", "0"], "--batch is '0'; it should be greater than or equal to 1"),
        (["--deadline", "nan"], "--deadline is 'nan'; it should be a finite number"),
        (["--queue", "4"], "--queue is 4 but --max-images 16"),
        (["--defense", "react", "--config", "paper"], "--config paper and --defense react are both given; choose one"),
        (["--defense", "aom"], "--defense is 'aom'; it should be 'second_look' or 'react'"),
        (["--log-level", "loud"], "--log-level is 'loud'; it should be 'debug', 'info'"),
        (["--secret-file", "nowhere"], "nowhere cannot be read"),
        (["--api-key-file", "nowhere"], "nowhere cannot be read"),
        (["--host", "256.0.0.1"], "cannot listen on 256.0.0.1"),
        (["--replicas", "2"], "--replicas is 2, but the engine is local; add --engine ray"),
        (["--engine", "far"], "--engine is 'far'; it should be 'local' or 'ray'"),
        (["--engine", "ray", "--address", "127.0.0.1"], "--address is '127.0.0.1'; write host:port"),
        (["--engine", "ray", "--replicas", "4", "--max-replicas", "2"], "--max-replicas is 2 but --replicas 4"),
        (["--engine", "ray", "--processes", "2"], "--processes is 2, but --engine ray has replicas; use --replicas"),
        (["--demo", "--processes", "2"], "--processes is 2, but only the process that runs a demo attack knows"),
        (["--port", "0", "--model", "no-such-model"], "no model is called 'no-such-model'"),
    ],
)
def test_wrong_flags_are_one_line(capsys: pytest.CaptureFixture[str], flags: list[str], line: str) -> None:
    assert main(["serve", "--quiet", *flags]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"react-clip: {line}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "threads"),
    [
        ("--device cpu", 6),
        ("--device cpu --processes 2", 6),
        ("--device cpu --processes 4 --threads 8", 8),
        ("", 1),
        ("--threads 4", 4),
    ],
)
def test_threads_of_the_model(monkeypatch: pytest.MonkeyPatch, flags: str, threads: int) -> None:
    """On a machine with a GPU where torch would take six threads."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.get_num_threads", lambda: 6)
    chosen: list[int] = []
    monkeypatch.setattr("torch.set_num_threads", chosen.append)
    set_threads(parsed(*flags.split()))
    assert chosen == [threads]


def test_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_secret(Settings()) is None
    file = tmp_path / "secret"
    file.write_bytes(b"0123456789abcdef\n")
    monkeypatch.setenv("REACT_CLIP_SERVE_SECRET", "fedcba9876543210")
    assert read_secret(Settings()) == b"fedcba9876543210"
    assert "fedcba" not in repr(Settings())
    assert read_secret(Settings(secret_file=file)) == b"0123456789abcdef"
    file.write_bytes(b"short")
    with pytest.raises(ReactClipError, match="5 bytes; it needs at least 16"):
        read_secret(Settings(secret_file=file))


def test_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not read_keys(Settings())
    monkeypatch.setenv("REACT_CLIP_SERVE_API_KEYS", "a-key-of-some-length, another-key-of-length")
    assert read_keys(Settings()) == {digest(b"a-key-of-some-length"), digest(b"another-key-of-length")}
    file = tmp_path / "keys"
    file.write_text("# nothing\n\n")
    with pytest.raises(ReactClipError, match="holds no API key"):
        read_keys(Settings(api_key_file=file))
    file.write_text("# the next is too short\na-key-of-some-length\nshort\n")
    with pytest.raises(ReactClipError, match=r"an API key of .* has 5 bytes; it needs at least 16"):
        read_keys(Settings(api_key_file=file))
