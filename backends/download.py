"""One file over HTTP (or from a `file:` URL) into a `.part` that a later call resumes.

`checkpoints.py` calls it. It knows neither what the bytes are nor their digest: the caller checks.
Blocking, standard library only, so that proxies and certificates are those of the environment (`SSL_CERT_FILE`, …).
"""

import http.client
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

from backends.errors import BackendError

Progress = Callable[[int, int], None]
"""Called with (bytes here, bytes in all) as they arrive."""

CHUNK_BYTES = 1 << 18
SILENCE_SECONDS_MAX = 30.0
# Attempts in a row that bring not one new byte, and attempts in all: a dead line and a bad one both end.
FRUITLESS_ATTEMPTS_MAX = 4
ATTEMPTS_MAX = 50


class DownloadError(BackendError):
    """The file can't be had now. What arrived stays in the part file."""

    code = "download_failed"


class _InterruptedError(Exception):
    """One attempt ended early; another may go on from where it stopped."""


def download(url: str, part: Path, *, size: int, progress: Progress, pause: Callable[[float], None]) -> None:
    """Fill `part` with the file at `url`, at most one byte more than `size`. An OSError is the disk's."""
    if urlsplit(url).scheme not in {"https", "http", "file"}:
        raise DownloadError(f"{url} is not an address that can be downloaded")
    fruitless, reason = 0, ""
    for _ in range(ATTEMPTS_MAX):
        before = _size(part)
        try:
            _receive(url, part, size, progress)
        except _InterruptedError as interruption:
            reason = str(interruption)
        else:
            return
        fruitless = 0 if _size(part) > before else fruitless + 1
        if fruitless == FRUITLESS_ATTEMPTS_MAX:
            break
        pause(2.0**fruitless / 2)
    raise DownloadError(f"{urlsplit(url).hostname or url}: {reason}")


def _receive(url: str, part: Path, size: int, progress: Progress) -> None:
    here = _size(part)
    with _open(url, here, part) as response:
        # A server that ignores the range answers 200 with the whole file: begin again.
        resumes = response.status == HTTPStatus.PARTIAL_CONTENT
        here = here if resumes else 0
        length = response.headers["Content-Length"]
        end = here + int(length) if length else None
        with part.open("ab" if resumes else "wb") as file:
            for chunk in _chunks(response, size + 1 - here):
                file.write(chunk)
                here += len(chunk)
                progress(here, size)
    if end is not None and here < min(end, size + 1):
        raise _InterruptedError("the connection was cut")


def _open(url: str, here: int, part: Path) -> http.client.HTTPResponse:
    request = urllib.request.Request(url, headers={"Range": f"bytes={here}-"} if here else {})  # noqa: S310 - scheme checked above
    try:
        response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=SILENCE_SECONDS_MAX)  # noqa: S310 - scheme checked above
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            part.unlink(missing_ok=True)  # longer than the file: not a part of it
        elif error.code < HTTPStatus.INTERNAL_SERVER_ERROR and error.code != HTTPStatus.TOO_MANY_REQUESTS:
            raise DownloadError(f"{url} answers {error.code}") from error
        raise _InterruptedError(f"status {error.code}") from error
    except urllib.error.URLError as error:
        if isinstance(error.reason, ssl.SSLCertVerificationError):
            raise DownloadError(
                f"no trust in the certificate of {urlsplit(url).hostname}, see SSL_CERT_FILE"
            ) from error
        raise _InterruptedError(str(error.reason)) from error
    except (http.client.HTTPException, OSError) as error:
        raise _InterruptedError(_describe(error)) from error
    return response


def _chunks(response: http.client.HTTPResponse, limit: int) -> Iterator[bytes]:
    while limit > 0:
        try:
            chunk = response.read(min(CHUNK_BYTES, limit))
        except (http.client.HTTPException, OSError) as error:
            raise _InterruptedError(_describe(error)) from error
        if not chunk:
            return
        limit -= len(chunk)
        yield chunk


def _describe(error: Exception) -> str:
    return str(error) or type(error).__name__


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
