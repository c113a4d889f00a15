"""Errors that callers may want to tell apart."""


class UnsupportedError(ValueError):
    """A combination that this package knows and refuses, instead of ignoring it.

    The message names the setting, the value it got, what is needed, and the way out; it is the same
    text on every rank. Everything else that a user can fix is a plain `ValueError`.
    """
