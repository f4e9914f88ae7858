"""Secrets come from files or the environment, never from flags, which every user of a machine can read."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

from react_clip.errors import ReactClipError
from react_clip.serve.settings import variable

SHORTEST = 16
"""Shorter secrets and keys could be guessed."""


def read_secret(path: str) -> tuple[bytes, bool]:
    """The secret that keys the noise, and whether it was made up for this process."""
    if path:
        secret, source = _read(path).strip(), path
    elif given := os.environ.get(variable("secret")):
        secret, source = given.strip().encode(), f"${variable('secret')}"
    else:
        return secrets.token_bytes(32), True
    if len(secret) < SHORTEST:
        raise ReactClipError(
            f"the secret of {source} has {len(secret)} bytes; it needs at least {SHORTEST}, such as those of "
            "`openssl rand -hex 32`"
        )
    return secret, False


def read_keys(path: str) -> KeyRing:
    """API keys, one a line (lines that start with # are comments), or separated by commas in the environment."""
    if path:
        lines, source = _read(path).decode("utf-8", "replace").splitlines(), path
    else:
        lines, source = os.environ.get(variable("api-keys"), "").replace(",", "\n").splitlines(), variable("api-keys")
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if path and not keys:
        raise ReactClipError(f"{source} holds no API key; write one a line, or leave --api-key-file out")
    if short := [key for key in keys if len(key) < SHORTEST]:
        raise ReactClipError(
            f"an API key of {source} has {len(short[0])} characters; keys need at least {SHORTEST}, such as those of "
            "`openssl rand -hex 32`"
        )
    return KeyRing(keys)


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ReactClipError(f"{path} cannot be read: {error.strerror}; check the path") from None


class KeyRing:
    """API keys as digests: comparing costs the same whatever is presented, and a memory dump shows no key.

    >>> ring = KeyRing(["a-key-of-16-chars"])
    >>> ring.opens("a-key-of-16-chars"), ring.opens("another"), bool(ring), bool(KeyRing([]))
    (True, False, True, False)
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def opens(self, presented: str) -> bool:
        """Whether this is one of the keys; every key is compared, so that time does not tell which came close."""
        digest = _digest(presented)
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0

    def __len__(self) -> int:
        return len(self._digests)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
