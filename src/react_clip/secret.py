"""What keys the noise: a secret that nobody knows, or a public seed where others shall be able to repeat it."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from functools import cache
from pathlib import Path
from typing import SupportsIndex

from react_clip.errors import ReactClipError

Seed = int | bytes
"""A public number for research, or a secret key for a service whose noise must not be predictable."""
SHORTEST_SECRET = 16
"""Fewest bytes of a secret."""
SECRET_FILE = "REACT_CLIP_SECRET_FILE"
"""Environment variable with the path of a file that holds the secret."""


def process_secret() -> bytes:
    """The secret of the file that ``$REACT_CLIP_SECRET_FILE`` names, else one that is drawn once per process.

    Nobody can predict its noise; with a secret that was drawn there is other noise after a restart.
    """
    path = os.environ.get(SECRET_FILE)
    return read_secret(path) if path else _drawn_secret()


@cache
def _drawn_secret() -> bytes:
    return secrets.token_bytes(32)


def was_drawn(seed: Seed) -> bool:
    """True for the secret that this process has drawn, which no other process knows."""
    return isinstance(seed, bytes) and hmac.compare_digest(seed, _drawn_secret())


@cache
def read_secret(path: str | Path) -> bytes:
    """The secret in a file, without white space around it; read once per process."""
    way_out = f"write one with openssl rand -hex 32 > {path}"
    try:
        secret = Path(path).expanduser().read_bytes().strip()
    except OSError as error:
        raise ReactClipError(f"the secret cannot be read from {path}: {error.strerror}; {way_out}") from None
    check_seed(secret, f"the secret in {path}", way_out)
    return secret


def seed_or_secret(seed: Seed | None, secret: bytes | None = None) -> Seed:
    """What keys the noise: the seed or the secret that is given, and without either the secret of this process.

    >>> seed_or_secret(0)
    0
    >>> seed_or_secret(None) == process_secret()
    True
    """
    if secret is None:
        key = process_secret() if seed is None else seed
    elif seed is not None:
        raise ReactClipError("seed and secret are both given: noise is repeatable or unpredictable; choose one")
    elif not isinstance(key := secret, bytes):
        raise ReactClipError(f"the secret is of type {type(secret).__name__}; give at least {SHORTEST_SECRET} bytes")
    check_seed(key)
    return key


def described(seed: Seed) -> int | str:
    """What records say about the key of the noise: a seed as it is, and of a secret only where it came from.

    The secret itself is never written; eight bytes of its hash tell whether two records had the same.

    >>> described(0), described(process_secret()), described(bytes(32))
    (0, 'random secret', 'secret c50d124a8aaf41a1')
    """
    if not isinstance(seed, bytes):
        return int(seed)
    return "random secret" if was_drawn(seed) else f"secret {hashlib.blake2b(seed, digest_size=8).hexdigest()}"


def check_seed(seed: object, name: str = "the secret", way_out: str = "give secrets.token_bytes(32)") -> None:
    """Refuse what is neither a number nor a secret that nobody can guess."""
    if not isinstance(seed, bytes | SupportsIndex):
        raise ReactClipError(f"seed is of type {type(seed).__name__}; give a whole number, or a secret of random bytes")
    if isinstance(seed, bytes) and len(seed) < SHORTEST_SECRET:
        raise ReactClipError(f"{name} has {len(seed)} bytes, which can be guessed, not {SHORTEST_SECRET}; {way_out}")
