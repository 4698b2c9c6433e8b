"""What goes wrong between here and the Hub while publishing, each as one sentence.

As in `failures`, only status codes and our own words are shown.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from g4tool.errors import G4Error, UsageError
from g4tool.hub.failures import UnreachableError, has_address, quiet

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

LOGIN = "log in with `hf auth login`, with a token that may write"
_AGAIN = "run this again; what has arrived is not sent twice, and nothing of it is published yet."
_QUOTA = re.compile(r"(storage|quota|space).*(limit|exceed|quota|reached|full)|payment", re.I)


@contextmanager
def publishing(repo: str, host: str) -> Iterator[None]:
    """Turns huggingface_hub's errors about writing to `repo` into G4Errors.

    Raises UnreachableError where the Hub gave no answer or a temporary one.
    """
    try:
        with quiet():
            if not has_address(host):
                raise UnreachableError(
                    f"{repo} cannot be published, for {urlsplit(host).hostname} was not found:"
                    " check the network, then run this again."
                )
            yield
    except G4Error:
        raise
    except Exception as error:
        # The library wraps what a file's transfer raised.
        cause = error.__cause__ if isinstance(error, RuntimeError) else None
        found = _explained(repo, host, cause or error)
        if found is None:
            raise
        raise found from error


def _explained(repo: str, host: str, error: BaseException) -> G4Error | None:
    from huggingface_hub import errors

    if isinstance(error, errors.HFValidationError):
        return UsageError(f"{repo!r} is no repository name of the Hub: give it as owner/name.")
    if isinstance(error, errors.OfflineModeIsEnabled):
        return UnreachableError(f"{repo} cannot be published offline: unset HF_HUB_OFFLINE.")
    if isinstance(error, errors.HfHubHTTPError):
        return _answered(repo, error)
    if isinstance(error, errors.HTTPError | RuntimeError):
        return UnreachableError(
            f"the connection to {host} failed ({type(error).__name__}): check the network and"
            f" {_AGAIN}"
        )
    if isinstance(error, ValueError):
        return G4Error(
            f"the Hub does not take what was sent for {repo} ({_first_line(error)}): nothing was"
            " published."
        )
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        return G4Error(f"a file of {repo} cannot be read: {error.strerror or error}{where}.")
    return None


def _answered(repo: str, error: "HfHubHTTPError") -> G4Error:
    status = error.response.status_code
    owner = repo.partition("/")[0]
    said = error.server_message or ""
    if status in (402, 403, 413) and (status != 403 or _QUOTA.search(said)):
        return G4Error(
            f"the Hub has no room for {repo} ({status}): {owner} is out of quota; make room there,"
            " or publish under another name. Nothing was published."
        )
    if status == 401:
        return G4Error(
            f"the Hub does not know this login ({status}): its token is wrong or has expired;"
            f" {LOGIN}, then run this again. Nothing was published."
        )
    if status == 403:
        return G4Error(
            f"this login may not write to {repo} ({status}): take a token that may write for"
            f" {owner}, or publish under a name of your own. Nothing was published."
        )
    if status == 404:
        return G4Error(
            f"{repo} is not there, or this login may not see it ({status}): check the name, or"
            f" {LOGIN}."
        )
    if status in (409, 412):
        return G4Error(
            f"{repo} changed while files were sent ({status}): {_AGAIN}",
        )
    if status == 429:
        return UnreachableError(
            f"the Hub asks to slow down ({status}): wait some minutes, then {_AGAIN}"
        )
    return UnreachableError(f"the Hub answered {status} for {repo}: {_AGAIN}")


def _first_line(error: BaseException) -> str:
    lines = [line.strip("-: ") for line in str(error).splitlines() if line.strip("-: ")]
    return "; ".join(lines)[:200] or type(error).__name__
