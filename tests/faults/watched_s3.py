"""A server that speaks S3 and tells of every request before it answers."""

from __future__ import annotations

import io
import re
import threading
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

REFUSED = b"<Error><Code>AccessDenied</Code></Error>"


@dataclass(frozen=True)
class Request:
    """What a client asked for."""

    method: str
    path: str
    query: str
    body: bytes

    def is_entry(self, kind: bytes, epoch: int) -> bool:
        """Whether this creates an entry of a log: one of that kind, about that epoch."""
        said = (rb'"kind":"%s"' % kind, rb'"epoch":%d\b' % epoch)
        return "/_log/" in self.path and all(re.search(part, self.body) for part in said)


class WatchedS3:
    """Serves from this process, until `close`.

    Parameters
    ----------
    watch : callable
        Told of each request in a thread of the server. True: it is refused, and changes nothing.
        A callable: it is carried out, then that is called, and then it is answered.
    """

    def __init__(self, watch: Callable[[Request], bool | Callable[[], None]]) -> None:
        from moto.moto_server.werkzeug_app import (
            DomainDispatcherApplication,
            MotoRequestHandler,
            create_backend_app,
        )
        from werkzeug.serving import make_server

        class Quiet(MotoRequestHandler):
            def log(self, type: str, message: str, *args: Any) -> None:
                pass

        self.watch = watch
        self._serve = DomainDispatcherApplication(create_backend_app)
        self._server = make_server(
            "127.0.0.1", 0, self._answer, threaded=True, request_handler=Quiet
        )
        self._thread = threading.Thread(target=self._server.serve_forever, name="s3")
        self._thread.start()
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def make_bucket(self, name: str) -> None:
        """Make a bucket, which tells nobody."""
        watch, self.watch = self.watch, lambda _: False
        request = urllib.request.Request(f"{self.address}/{name}", method="PUT")
        urllib.request.urlopen(request, timeout=60).close()
        self.watch = watch

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        environ["wsgi.input"] = io.BytesIO(body)
        told = Request(
            environ["REQUEST_METHOD"], environ["PATH_INFO"], environ["QUERY_STRING"], body
        )

        def start_and_close(status: str, headers: list[tuple[str, str]], *args: Any) -> Any:
            return start(status, [*headers, ("Connection", "close")], *args)

        verdict = self.watch(told)
        if verdict is True:
            start_and_close("403 Forbidden", [("Content-Length", str(len(REFUSED)))])
            return [REFUSED]
        answer = list(self._serve(environ, start_and_close))
        if verdict is not False:
            verdict()
        return answer
