"""The error that users see, and foreign errors in one line."""


class ReactClipError(ValueError):
    """Bad input or a missing resource; the command line prints it as one line and exits with code 2."""


def first_line(error: BaseException) -> str:
    """First non-empty line of an error's text; the system's message for file errors, the type's name for empty ones.

    >>> first_line(KeyError()), first_line(ValueError("a" + chr(10) + "b"))
    ('KeyError', 'a')
    """
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
