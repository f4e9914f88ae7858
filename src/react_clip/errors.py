"""The errors that users see, and foreign errors in one line."""

from pathlib import Path


class ReactClipError(ValueError):
    """Bad input or a missing resource; the command line prints it as one line and exits with code 2."""


class MissingFileError(ReactClipError, FileNotFoundError):
    """A file or folder that does not exist."""


class MissingPackageError(ReactClipError, ImportError):
    """A package of an extra that is not installed."""


def missing_or_wrong(path: Path, line: str, advice: str = "check the path") -> ReactClipError:
    """The error for a path that cannot be used: :class:`MissingFileError` if nothing is there.

    >>> missing_or_wrong(Path("nowhere"), "nowhere is no folder")
    MissingFileError('nowhere does not exist; check the path')
    """
    return ReactClipError(line) if path.exists() else MissingFileError(f"{path} does not exist; {advice}")


def first_line(error: BaseException) -> str:
    """First non-empty line of an error's text; the system's message for file errors, the type's name for empty ones.

    >>> first_line(KeyError()), first_line(ValueError("a" + chr(10) + "b"))
    ('KeyError', 'a')
    """
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
