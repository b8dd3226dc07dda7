"""A web server with one file, which serves ranges, and may break off, lie or refuse as a test asks."""

import contextlib
import dataclasses
import socket
import threading
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclasses.dataclass
class FileServer:
    """`cuts` are counts of body bytes after which an answer breaks off, one for each of the first answers."""

    content: bytes
    cuts: list[int] = dataclasses.field(default_factory=list)
    honours_ranges: bool = True
    status: HTTPStatus | None = None
    ranges_asked: list[str | None] = dataclasses.field(default_factory=list)
    url: str = ""


@contextlib.contextmanager
def serve_file(server: FileServer) -> Iterator[FileServer]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = self.headers["Range"]
            server.ranges_asked.append(asked)
            if server.status is not None:
                self.send_error(server.status)
                return
            start = 0
            if asked and server.honours_ranges:
                start = int(asked.removeprefix("bytes=").removesuffix("-"))
                if start >= len(server.content):
                    self.send_error(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
                    return
            self.send_response(HTTPStatus.PARTIAL_CONTENT if asked and server.honours_ranges else HTTPStatus.OK)
            self.send_header("Content-Length", str(len(server.content) - start))
            self.end_headers()
            body = server.content[start:]
            self.wfile.write(body[: server.cuts.pop(0)] if server.cuts else body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        thread = threading.Thread(target=listener.serve_forever, name="range-server", kwargs={"poll_interval": 0.01})
        thread.start()
        server.url = f"http://127.0.0.1:{listener.server_port}/file"
        try:
            yield server
        finally:
            listener.shutdown()
            thread.join(timeout=5)


def closed_port() -> int:
    """A port of this machine on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
