"""The errors a user can act on. Each message is one clear sentence: what, where, what to do."""


class G4Error(Exception):
    """A failure with a cause the user can see and mend; the command exits with `exit_code`."""

    exit_code = 1


class UsageError(G4Error):
    """The command, a flag or a recipe asks for something that does not exist or contradicts itself."""

    exit_code = 2


class IncompleteError(G4Error):
    """Everything this machine can do is done; the message names what is missing and how to go on."""

    exit_code = 3
