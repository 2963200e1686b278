"""The errors a person sees: one line that says what, found, expected and what to do."""


class SpecedgeError(Exception):
    """Something outside the program is wrong: a file, an option's value, a device.

    The message is one line: what it is about (file, tensor or key), the value found, what was expected and what to do.
    The command line prints it and leaves with `exit_code`.
    """

    exit_code = 1


class UsageError(SpecedgeError):
    """The request itself makes no sense, whatever the files hold."""

    exit_code = 2


def first_line(error: Exception) -> str:
    """What another program's error says, short enough for a line of ours."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
