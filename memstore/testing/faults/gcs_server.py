"""Google Cloud Storage's XML interface over moto's S3, which it resembles: `python -m ... TOKEN` serves it on loopback.

What differs is here, as Google documents it: a bearer token instead of signatures; `x-goog-if-generation-match: 0` for
"only where there is none"; a 404 for the removal of an object that is not there. Other generations are refused, for
moto has none. Writes take turns: moto looks whether there is an object before it stores one, and both must be one step.
A program of its own because moto keeps its state in the process.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from moto.moto_server.werkzeug_app import MotoRequestHandler, create_backend_app
from werkzeug.serving import run_simple
from werkzeug.test import run_wsgi_app
from werkzeug.wrappers import Response

_MATCH = "HTTP_X_GOOG_IF_GENERATION_MATCH"
_ERROR = '<?xml version="1.0" encoding="UTF-8"?><Error><Code>{}</Code><Message>{}</Message></Error>'


class GcsServer:
    """The WSGI application."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.moto: Callable[..., Iterable[bytes]] = create_backend_app("s3")
        self.turn = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if environ.get("HTTP_AUTHORIZATION") != f"Bearer {self.token}":
            return _refusal(401, "AuthenticationRequired", "Invalid bearer token.")(environ, start_response)
        environ["HTTP_AUTHORIZATION"] = "AWS test:test"  # moto takes any, and shows nothing to a request without
        match environ.pop(_MATCH, None):
            case None:
                pass
            case "0":
                environ["HTTP_IF_NONE_MATCH"] = "*"
            case other:
                return _refusal(501, "NotImplemented", f"generation {other}")(environ, start_response)
        method = environ["REQUEST_METHOD"]
        with self.turn if method in ("PUT", "DELETE") else contextlib.nullcontext():
            if method == "DELETE":
                look = {**environ, "REQUEST_METHOD": "GET", "HTTP_RANGE": "bytes=0-0"}
                body, status, headers = run_wsgi_app(self.moto, look)
                if status.startswith("404"):
                    return Response(body, status, headers)(environ, start_response)
            return list(self.moto(environ, start_response))


def _refusal(status: int, code: str, message: str) -> Response:
    return Response(_ERROR.format(code, message), status, content_type="application/xml")


if __name__ == "__main__":
    run_simple("127.0.0.1", 0, GcsServer(sys.argv[1]), threaded=True, request_handler=MotoRequestHandler)
