"""Requests to an OpenAI-compatible server, and which of its failures pass by themselves.

Failures that pass (no connection, 429, 5xx, time-outs, half an answer) are tried again after a wait that doubles each
time, shortened by chance so that not all come back at once, and is never shorter than the server's Retry-After.
"""

import email.utils
import json
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from email.message import Message
from http.client import HTTPException
from typing import Any, TypeVar
from urllib.parse import urlsplit

FIRST_WAIT = 0.5
LONGEST_WAIT = 60.0
"""Seconds before the first repetition, and the most that doubling comes to."""
LONGEST_RETRY_AFTER = 600.0
"""Seconds; who asks for more is not waited for."""
PASSING = {408, 409, 425, 429}
"""What passes by itself, besides 5xx."""
OF_ONE_REQUEST = {400, 413, 422}
"""What may be wrong with this prompt only."""

T = TypeVar("T")


class ServerError(Exception):
    """The server cannot answer: nothing that a repetition would change."""


class PromptError(Exception):
    """The server does not answer this one prompt."""


class StoppedError(Exception):
    """The run ends while a request waits for its turn."""


class PassingError(Exception):
    """A failure that may pass by itself."""

    def __init__(self, message: str, *, wait: float = 0.0, is_down: bool = False) -> None:
        """Say what happened.

        Args:
            message: What the server said.
            wait: Seconds that it asks to wait.
            is_down: Nobody listens there, which is no fault of the prompt.
        """
        super().__init__(message)
        self.wait = wait
        self.is_down = is_down


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Makes redirects errors: to follow one would hand the key to another server, and ask it without the prompt."""

    def redirect_request(self, *unused: Any) -> None:
        """Do not follow."""


class Server:
    """An OpenAI-compatible server; any number of threads may use it."""

    def __init__(self, url: str, *, key: str | None, timeout: float, retries: int) -> None:
        """Set up without asking anything.

        Args:
            url: Where its paths start, such as http://localhost:8000/v1; a user and password in it are refused.
            key: Sent as the bearer token, if there is one.
            timeout: Seconds without a sign of life after which a request has failed.
            retries: How often a request that failed is repeated.
        """
        self.url = url.rstrip("/")
        self.host = urlsplit(url).netloc
        if "@" in self.host:
            raise ValueError("the server's URL holds a user or password; set OPENAI_API_KEY instead")
        self.stopped = threading.Event()
        self._opener = urllib.request.build_opener(_NoRedirects)
        self._headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        self._timeout = timeout
        self._retries = retries

    def find_model(self, name: str | None) -> dict[str, Any]:
        """Return what the server says of the model of this name, by default of the only one.

        Raises:
            ServerError: If it does not serve it, serves several, or does not answer.
        """
        try:
            listed = self.persist(lambda: self.request("/models", may_be_down=False))
        except PromptError as error:
            raise ServerError(str(error)) from error
        found = listed.get("data") if isinstance(listed, dict) else None
        models = [each for each in found or [] if isinstance(each, dict) and isinstance(each.get("id"), str)]
        names = [each["id"] for each in models]
        if not models:
            raise ServerError(f"{self.url}/models lists no model, got {json.dumps(listed)[:200]}")
        if name is None and len(models) > 1:
            raise ServerError(f"{self.url} serves {len(models)} models: {', '.join(names)}; choose by --server-model")
        if name is not None and name not in names:
            raise ServerError(f"{self.url} does not serve {name!r} but {', '.join(names)}; correct --server-model")
        return models[0] if name is None else models[names.index(name)]

    def persist(self, call: Callable[[], T]) -> T:
        """Return what the call does, which is repeated while its failures may pass.

        Raises:
            PromptError: If it failed every time.
            ServerError: If nobody listens any more, or the server asks to wait for very long.
            StoppedError: If the run ended meanwhile.
        """
        for attempt in range(self._retries + 1):
            try:
                return call()
            except PassingError as error:
                failure = error
            if failure.wait > LONGEST_RETRY_AFTER:
                raise ServerError(f"the server asks to wait for {failure.wait:.0f} s: {failure}") from failure
            if attempt < self._retries:
                wait = min(LONGEST_WAIT, FIRST_WAIT * 2**attempt) * random.uniform(0.5, 1)
                if self.stopped.wait(max(wait, failure.wait)):
                    raise StoppedError from failure
        kind = ServerError if failure.is_down else PromptError
        raise kind(f"{failure} ({self._retries + 1} tries)") from failure

    def request(self, path: str, body: Mapping[str, object] | None = None, *, may_be_down: bool = True) -> Any:
        """Send one request and return the decoded reply.

        Args:
            path: Appended to the URL.
            body: Sent as JSON; None gets.
            may_be_down: Whether a refused connection may pass, as when the server is started again.

        Raises:
            PassingError: If it failed and may not fail the next time.
            PromptError: If the server refuses what is asked.
            ServerError: If it refuses us.
        """
        url = self.url + path
        content = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(url, content, self._headers)
            with self._opener.open(request, timeout=self._timeout) as reply:
                return json.loads(reply.read())
        except urllib.error.HTTPError as error:
            raise _judge(error, url) from error
        except (OSError, HTTPException) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            is_down = isinstance(error, urllib.error.URLError)  # urllib's own word for what fails before a reply
            if is_down and not may_be_down:
                raise ServerError(f"{url} cannot be reached ({reason}); correct the URL or start the server") from error
            raise PassingError(f"{url}: {reason or type(reason).__name__}", is_down=is_down) from error
        except ValueError as error:  # of JSON and UTF-8
            raise PassingError(f"{url}: the reply is no JSON ({error})") from error


def _judge(error: urllib.error.HTTPError, url: str) -> Exception:
    """Return what an HTTP status means for us."""
    message = f"{url}: {error.code} {error.reason}: {_read_message(error)}"
    if error.code in PASSING or error.code >= 500:
        return PassingError(message, wait=_read_retry_after(error.headers))
    if error.code in OF_ONE_REQUEST:
        return PromptError(message)
    if 300 <= error.code < 400:
        return ServerError(
            f"{url}: {error.code} {error.reason}: it has moved to {error.headers.get('Location')}; ask there"
        )
    hint = {401: "; set OPENAI_API_KEY", 403: "; set OPENAI_API_KEY", 404: "; most URLs end in /v1"}.get(error.code, "")
    return ServerError(message + hint)


def _read_message(error: urllib.error.HTTPError) -> str:
    """Return the server's own words; each server has its own place for them."""
    try:
        text = error.read(10_000).decode(errors="replace")
    except (OSError, HTTPException):
        return "no message"
    try:
        content = json.loads(text)
    except ValueError:
        return text[:300].strip() or "no message"
    for key in ("error", "message", "detail"):
        if isinstance(content, dict) and key in content:
            content = content[key]
    return (content if isinstance(content, str) else json.dumps(content))[:500]


def _read_retry_after(headers: Message) -> float:
    """Return the seconds of a Retry-After, which may also be a date; 0 if there is none that can be read."""
    text = headers.get("Retry-After") or ""
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except ValueError:
        return 0.0
