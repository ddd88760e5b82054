"""Quotes the error of another library in one line, to be part of a sentence of our own."""


def first_line(error: BaseException) -> str:
    """The first line of the error's text, or its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
