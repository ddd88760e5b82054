"""What an error of another library says, in one line of our own sentence."""


def first_line(error: BaseException) -> str:
    """The first line of the error's text, or its type where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
