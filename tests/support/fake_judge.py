"""A judge server on a real socket, which processes of the package can use."""

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any


class FakeJudge(http.server.BaseHTTPRequestHandler):
    """A judge that assigns all responses to one cluster."""

    model = "judge-1"

    def do_GET(self) -> None:
        self._answer({"data": [{"id": self.model}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        names = body["response_format"]["json_schema"]["schema"]["required"]
        content = json.dumps({name: {"rationale": "same", "cluster": 1} for name in names})
        self._answer({"choices": [{"finish_reason": "stop", "message": {"role": "assistant", "content": content}}]})

    def _answer(self, body: Any) -> None:
        content = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """Runs the judge on a free port and yields its URL."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeJudge)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
