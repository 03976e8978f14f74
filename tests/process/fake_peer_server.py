"""A made-up completions server: `fake_peer_server.py PORT MODE`. It streams three tokens in two pieces."""

from __future__ import annotations

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    mode = ""

    def do_GET(self) -> None:
        ready = self.mode != "never"
        self._head(200 if ready or self.path != "/health" else 503, "application/json")
        self.wfile.write(b'{"version": "7"}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.mode == "refuses":
            self._head(400, "application/json")
            self.wfile.write(b'{"error": "ignore_eos: what is that?"}')
            return
        self._head(200, "text/event-stream")
        counts = [1, 3] if self.mode != "stops" else [1, 2]
        for index, count in enumerate(counts):
            if index and self.mode == "dies":
                os._exit(5)
            if index and self.mode == "hangs":
                time.sleep(3600)
            cached = 9 if self.mode == "caches" else 0
            usage = {
                "prompt_tokens": len(body["prompt"].split()),
                "completion_tokens": count,
                "prompt_tokens_details": {"cached_tokens": cached},
            }
            event = {"choices": [{"index": 0, "text": "x"}], "usage": usage}
            if self.mode == "errs":
                event = {"error": {"message": "out of memory"}}
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            time.sleep(0.01)
        self.wfile.write(b"data: [DONE]\n\n")

    def _head(self, status: int, kind: str) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.end_headers()


if __name__ == "__main__":
    Handler.mode = sys.argv[2]
    if Handler.mode == "ends":
        sys.exit("no such model")
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
