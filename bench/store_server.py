"""A plain S3 server for `store_pull`: whole objects and ranges of a folder's files, by sendfile.

moto's server copies an object whole for each range of it, so that nothing else could be measured: it takes what is
published, and this one shows that, and takes the notes of readers. Run as a module with the folder, which is the only
bucket, an address and a port.
"""

from __future__ import annotations

import email.utils
import http.server
import re
import sys
from http import HTTPStatus
from pathlib import Path

_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = self._file()
        if not path.is_file():
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        with path.open("rb") as file:
            size = path.stat().st_size
            asked = _RANGE.fullmatch(self.headers.get("Range") or "")
            start, end = (int(asked[1]), min(int(asked[2]) + 1, size)) if asked else (0, size)
            self.send_response(HTTPStatus.PARTIAL_CONTENT if asked else HTTPStatus.OK)
            for name, value in (
                ("Content-Length", str(end - start)), ("Content-Range", f"bytes {start}-{end - 1}/{size}"),
                ("ETag", f'"{path.stat().st_mtime_ns:x}"'), ("Last-Modified", email.utils.formatdate(usegmt=True)),
            ):  # fmt: skip
                self.send_header(name, value)
            self.end_headers()
            self.connection.sendfile(file, start, end - start)

    def do_PUT(self) -> None:
        path = self._file()
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if body:  # else it is the bucket, which is there
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(body)
        self.send_response(HTTPStatus.OK)
        self.send_header("ETag", f'"{hash(body):x}"')
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _file(self) -> Path:
        return Path(sys.argv[1], *self.path.partition("?")[0].strip("/").split("/")[1:])

    def log_message(self, *_: object) -> None:
        """Nothing is logged."""


if __name__ == "__main__":
    with http.server.ThreadingHTTPServer((sys.argv[2], int(sys.argv[3])), _Handler) as server:
        server.serve_forever()
