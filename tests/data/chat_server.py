"""A small server that answers like vLLM, and fails as it is told."""

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Fault = Callable[[str, int], Mapping[str, Any] | None]


class ChatServer(ThreadingHTTPServer):
    """Answers depend on messages and seed only.

    `fault` gets the last message and how often it was asked before, and returns what is odd about this reply: `status`
    with `headers` and `error`, `drop` (no reply), `torn` (half of it), `wait` (seconds), or keys of the reply itself.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, count_tokens: Callable[[list[dict[str, str]]], int]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self.count_tokens = count_tokens
        self.fault: Fault = lambda text, times: None
        self.models: list[dict[str, Any]] = [{"id": "served", "object": "model", "owned_by": "vllm", "created": 7}]
        self.asked: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.headers: list[dict[str, str]] = []
        self.answered = 0
        self.most_at_once = 0
        self.lock = threading.Lock()
        self._seen: Counter[str] = Counter()
        self.now = 0
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of clients that were killed."""

    def enter(self, body: dict[str, Any], headers: dict[str, str]) -> int:
        with self.lock:
            self.asked.append(body)
            self.times.append(time.monotonic())
            self.headers.append(headers)
            self.now += 1
            self.most_at_once = max(self.most_at_once, self.now)
            self._seen[body["messages"][-1]["content"]] += 1
            return self._seen[body["messages"][-1]["content"]] - 1

    def leave(self) -> None:
        with self.lock:
            self.now -= 1
            self.answered += 1


class Handler(BaseHTTPRequestHandler):
    server: ChatServer

    def log_message(self, format: str, *args: object) -> None:
        """Be silent."""

    def do_GET(self) -> None:
        if self.path != "/v1/models":
            return self.send(404, {"detail": "Not Found"})
        return self.send(200, {"object": "list", "data": self.server.models})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        times = self.server.enter(body, dict(self.headers))
        try:
            fault = dict(self.server.fault(body["messages"][-1]["content"], times) or {})
            time.sleep(fault.pop("wait", 0))
        finally:
            self.server.leave()  # before the client has its reply, and may ask again
        if fault.pop("drop", False):
            return self.connection.close()
        if "status" in fault:
            error = {"error": {"message": fault.get("error", "out of order"), "code": fault["status"]}}
            return self.send(fault["status"], error, headers=fault.get("headers", {}))
        return self.send(200, self.reply(body) | fault, torn=fault.pop("torn", None))

    def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        text, is_cut = expected_answer(body["messages"], body["seed"])
        message = {"role": "assistant", "content": text}
        usage = {"prompt_tokens": self.server.count_tokens(body["messages"]), "completion_tokens": 5}
        choice = {"index": 0, "message": message, "finish_reason": "length" if is_cut else "stop"}
        # every reply has the same id, as those of badly written proxies
        return {"id": "chatcmpl-1", "model": body["model"], "choices": [choice], "usage": usage}

    def send(
        self, status: int, content: object, *, headers: Mapping[str, str] | None = None, torn: str | None = None
    ) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data) // 2 if torn == "json" else len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if torn else data)


def expected_answer(messages: list[dict[str, str]], seed: int) -> tuple[str, bool]:
    """Text and whether it is cut; then half a character is at its end."""
    digest = hashlib.sha256(json.dumps([messages, seed]).encode()).hexdigest()
    is_cut = int(digest, 16) % 3 == 0
    return f"Answer {digest[:8]} é\n" + "\ufffd" * is_cut, is_cut
