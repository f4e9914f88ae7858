"""Flags, environment variables, secrets and keys."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from react_clip import ReactClipError
from react_clip.cli import main, parse_args
from react_clip.cli.serve import settings_of
from react_clip.serve.server import open_socket
from react_clip.serve.settings import Secrets, Settings, allowed_hosts, digest, read_secrets


def parsed(*flags: str) -> Settings:
    return settings_of(parse_args(["serve", *flags]))


def test_there_are_few_settings_and_each_is_a_flag_and_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(Settings.model_fields) <= 36
    flags = parsed(
        *("--port", "9", "--deadline", "1.5", "--demo", "--labels", "a, b", "--template", "x {}, or", "--template"),
        *("y {}", "--allowed-hosts", "a.example, *.b.example"),
    )
    assert (flags.port, flags.deadline, flags.demo, flags.template) == (9, 1.5, True, ["x {}, or", "y {}"])
    given = {"PORT": "9", "DEADLINE": "1.5", "DEMO": "yes", "LABELS": "a, b", "TEMPLATE": "x {}, or\ny {}"}
    given |= {"ALLOWED_HOSTS": "a.example,*.b.example", "BATCH": ""}
    for name, value in given.items():
        monkeypatch.setenv(f"REACT_CLIP_SERVE_{name}", value)
    assert parsed() == flags
    assert parsed("--port", "10").port == 10
    monkeypatch.setenv("REACT_CLIP_SERVE_DEMO", "perhaps")
    with pytest.raises(ReactClipError, match=r"^\$REACT_CLIP_SERVE_DEMO is 'perhaps'; it should be a valid boo"):
        parsed()


def test_a_variable_that_is_no_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REACT_CLIP_SERVE_API_KEY_FILE", "keys")
    with pytest.raises(ReactClipError, match=r"^\$REACT_CLIP_SERVE_API_KEY_FILE is no setting"):
        parsed()


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--port", "70000"], "--port is '70000'; it should be less than or equal to 65535"),
        (["--batch", "0"], "--batch is '0'; it should be greater than or equal to 1"),
        (["--deadline", "nan"], "--deadline is 'nan'; it should be a finite number"),
        (["--defense", "react", "--config", "paper"], "--config paper and --defense react are both given; choose one"),
        (["--labels", "a", "--photos", "b"], "--labels a and --photos b are both given; choose one"),
        (["--defense", "aom"], "--defense is 'aom'; it should be 'second_look', 'react' or 'none'"),
        (["--shadow-share", "0"], "--shadow-share is '0'; it should be greater than 0"),
        (["--log-level", "loud"], "--log-level is 'loud'; it should be 'debug', 'info'"),
        (["--secrets-dir", "nowhere"], "--secrets-dir nowhere is no folder"),
        (["--host", "256.0.0.1"], "cannot listen on 256.0.0.1"),
        (["--demo", "--workers", "2"], "--workers is 2, but the demo attacks the model in its own process"),
        (["--port", "0", "--model", "no-such-model"], "no model is called 'no-such-model'"),
    ],
)
def test_wrong_flags_are_one_line(capsys: pytest.CaptureFixture[str], flags: list[str], line: str) -> None:
    assert main(["serve", "--quiet", *flags]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"react-clip: {line}")
    assert err.count("\n") == 1


def test_secrets_come_from_files_or_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = read_secrets(Settings())
    assert drawn.drawn
    file = tmp_path / "mine"
    file.write_text("a secret of sixteen bytes\n")
    monkeypatch.setenv("REACT_CLIP_SECRET_FILE", str(file))
    assert read_secrets(Settings()) == Secrets(b"a secret of sixteen bytes", frozenset())
    monkeypatch.setenv("REACT_CLIP_SECRET_FILE", "nowhere")
    assert read_secrets(Settings(secret_file=file)).noise == b"a secret of sixteen bytes"
    with pytest.raises(ReactClipError, match="the secret cannot be read from nowhere: No such file or directory"):
        read_secrets(Settings())
    monkeypatch.setenv("REACT_CLIP_SERVE_SECRET", "fedcba9876543210")
    monkeypatch.setenv("REACT_CLIP_SERVE_API_KEYS", "a-key-of-some-length, another-key-of-length")
    given = read_secrets(Settings())
    keys = frozenset(map(digest, (b"a-key-of-some-length", b"another-key-of-length")))
    assert given == Secrets(b"fedcba9876543210", keys)
    assert "fedcba" not in repr(given)
    for name in ("SECRET", "API_KEYS"):
        monkeypatch.delenv(f"REACT_CLIP_SERVE_{name}")
    secret, file = (tmp_path / f"react_clip_serve_{name}" for name in ("secret", "api_keys"))
    secret.write_text("0123456789abcdef\n")
    file.write_text("# comment\na-key-of-some-length\n\nanother-key-of-length\n")
    files = read_secrets(Settings(secrets_dir=tmp_path))
    assert (files.noise, files.keys) == (b"0123456789abcdef", given.keys)
    for broken, text, line in (
        (secret, "short", "5 bytes; it needs at least 16"),
        (file, "# too short\nshort\n", "an API key has 5 bytes"),
        (file, "# nothing\n", "the API keys are empty"),
    ):
        before = broken.read_text()
        broken.write_text(text)
        with pytest.raises(ReactClipError, match=line):
            read_secrets(Settings(secrets_dir=tmp_path))
        broken.write_text(before)


def test_hosts_are_this_machines_unless_callers_have_keys() -> None:
    none, some = Secrets(b"", frozenset()), Secrets(b"", frozenset({b"x"}))
    assert {"localhost", "127.0.0.1", "10.0.0.1"} <= set(allowed_hosts(Settings(host="10.0.0.1"), none))
    assert "*" not in allowed_hosts(Settings(host="0.0.0.0"), none)
    assert allowed_hosts(Settings(), some) == ["*"]
    assert allowed_hosts(Settings.model_validate({"allowed_hosts": "a.example"}), some) == ["a.example"]


def test_small_packets_are_sent_at_once() -> None:
    """Answers have two parts; without TCP_NODELAY the second would wait for the caller's acknowledgement."""
    with open_socket(Settings(port=0)) as listener:
        assert listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
