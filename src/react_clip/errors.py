"""The one error that users see: a single line naming the value, the limit and the way out."""


class ReactClipError(ValueError):
    """Bad input or a missing resource; the command line prints it as one line and exits with code 2."""
