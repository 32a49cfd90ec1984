"""Errors that a user sees as one clear line."""


class InputError(Exception):
    """Bad usage or input: the message is one line that names the file and the place.

    The command line prints it and exits with 2; nothing was done.
    """
