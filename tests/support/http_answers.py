"""A handler for servers that stand in for a hub: answers with a body, HEAD as GET without one."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler


class AnsweringHandler(BaseHTTPRequestHandler):
    """Subclasses define `do_GET` and call `send` once in it."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def send(self, status: int, body: bytes = b"", **headers: str) -> None:
        """One whole answer; a header's underscores stand for dashes."""
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self) -> None:
        raise NotImplementedError

    def do_HEAD(self) -> None:
        self.do_GET()
