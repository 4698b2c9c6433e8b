"""What goes wrong between here and the Hub, each as one sentence.

Only status codes and our own words are shown: a library's message may quote a request's headers.
"""

import logging
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from g4tool.errors import G4Error, UsageError


class UnreachableError(G4Error):
    """The Hub gave no answer, or offline mode forbids asking; what is on disk may still do."""


@contextmanager
def explained(repo: str, revision: str, host: str) -> Iterator[None]:
    """Turns huggingface_hub's errors about `repo` at `revision` into G4Errors.

    `host` is the Hub's address. Raises UnreachableError where there was no answer, at once where
    nobody knows that name: the library would try it again for half a minute.
    """
    try:
        with quiet():
            if not has_address(host):
                raise UnreachableError(
                    f"{repo} cannot be fetched, for {urlsplit(host).hostname} was not found: check"
                    " the network, then run this again."
                )
            yield
    except G4Error:
        raise
    except Exception as error:
        found = _explained(repo, revision, host, error)
        if found is None:
            raise
        raise found from error


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps the library's warnings about retries off the terminal; what fails is raised anyway."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    if level == logging.WARNING:  # its default; HF_HUB_VERBOSITY asks for another
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def has_address(url: str) -> bool:
    from huggingface_hub import constants

    parts = urlsplit(url)
    proxies = urllib.request.getproxies()
    # Offline the library does not ask, and behind a proxy names are not ours to look up.
    if constants.HF_HUB_OFFLINE or {"all", parts.scheme} & proxies.keys():
        return True
    try:
        socket.getaddrinfo(parts.hostname, parts.port or parts.scheme)
    except (OSError, ValueError):
        return False
    return True


def _explained(repo: str, revision: str, host: str, error: Exception) -> G4Error | None:
    from huggingface_hub import errors

    if isinstance(error, errors.HFValidationError):
        return UsageError(f"{repo!r} is no repository name of the Hub: give it as owner/name.")
    if isinstance(error, errors.GatedRepoError):
        return G4Error(
            f"{repo} is gated: accept its terms at {host}/{repo}, log in with `hf auth login`,"
            " and run this again."
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return G4Error(
            f"the Hub has no model repository {repo} that you may see: check the name, or log in"
            " with `hf auth login` if it is private."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return G4Error(
            f"{repo} has no revision {revision!r}: see {host}/{repo}/commits/main for those it has."
        )
    if isinstance(error, errors.OfflineModeIsEnabled | errors.LocalEntryNotFoundError):
        return UnreachableError(
            f"{repo} is not on this machine as a whole and the Hub was not asked or gave no answer:"
            " check the network and HF_HUB_OFFLINE, then run this again."
        )
    if isinstance(error, errors.HfHubHTTPError):
        return _answered(repo, error.response.status_code)
    if isinstance(error, errors.HTTPError):  # httpx's base class, whichever fork is in use
        return UnreachableError(
            f"the connection to {host} failed ({type(error).__name__}): check the network and run"
            f" this again; files of {repo} that arrived whole are kept."
        )
    if isinstance(error, OSError):
        return _broken(repo, error)
    if isinstance(error, (RuntimeError, getattr(errors, "XetDownloadError", RuntimeError))):
        return UnreachableError(
            f"the transfer of {repo} broke off ({type(error).__name__}): run this again; files that"
            " arrived whole are kept."
        )
    return None


def _answered(repo: str, status: int) -> G4Error:
    if status in (401, 403):
        return G4Error(
            f"the Hub refuses access to {repo} ({status}): log in with `hf auth login`, with a"
            " token that may read it."
        )
    return UnreachableError(
        f"the Hub answered {status} for {repo}: run this again later; files that arrived whole are"
        " kept."
    )


def _broken(repo: str, error: OSError) -> G4Error:
    if error.strerror:
        where = f" ({error.filename})" if error.filename else ""
        return G4Error(f"files of {repo} cannot be written: {error.strerror}{where}.")
    # The library says so when fewer bytes came than were announced.
    return UnreachableError(
        f"a file of {repo} did not arrive whole: run this again; those that did are kept."
    )
