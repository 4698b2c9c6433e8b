"""The errors a user can act on. Each message is one clear sentence: what, where, what to do."""


class G4Error(Exception):
    """A failure with a cause the user can see and mend; the command exits with `exit_code`."""

    exit_code = 1


class UsageError(G4Error):
    """The command, a flag or a recipe asks for what does not exist or contradicts itself."""

    exit_code = 2


class IncompleteError(G4Error):
    """All that this machine can do is done; the message says what is missing and how to go on."""

    exit_code = 3
