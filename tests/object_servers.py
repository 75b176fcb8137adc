"""Object stores on this machine: S3, what Google's clients speak, and Azurite."""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import io
import json
import socket
import subprocess
import threading
import urllib.request
import uuid
from collections.abc import Callable, Iterable, Mapping
from email.utils import formatdate
from pathlib import Path
from typing import Any


class S3Server:
    """Speaks S3 from this process, by way of moto, until `close`.

    Attributes
    ----------
    url : str
        Of a bucket.
    environment : dict of str to str
        What a client needs.
    drops : int
        How many of the next connections end instead of an answer; such a request changes nothing.
    """

    scheme = "s3"

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import (
            DomainDispatcherApplication,
            MotoRequestHandler,
            create_backend_app,
        )
        from werkzeug.serving import make_server

        class Quiet(MotoRequestHandler):
            def log(self, type: str, message: str, *args: Any) -> None:
                pass

        self.drops = 0
        self._serve = DomainDispatcherApplication(create_backend_app)
        self._server = make_server(
            "127.0.0.1", 0, self._answer, threaded=True, request_handler=Quiet
        )
        self._thread = threading.Thread(target=self._server.serve_forever, args=[0.02], name="s3")
        self._thread.start()
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        bucket = f"bucket{uuid.uuid4().hex}"
        request = urllib.request.Request(f"{self.address}/{bucket}", method="PUT")
        urllib.request.urlopen(request, timeout=60).close()
        self.url = f"{self.scheme}://{bucket}"
        self.environment = {
            "AWS_ENDPOINT_URL": self.address,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "name",
            "AWS_SECRET_ACCESS_KEY": "secret",
        }

    def close(self) -> None:
        self.drops = 0
        # Long objects are in files that are open as long as they are known.
        request = urllib.request.Request(f"{self.address}/moto-api/reset", method="POST")
        urllib.request.urlopen(request, timeout=60).close()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        environ["wsgi.input"] = io.BytesIO(body)

        def start_and_close(status: str, headers: list[tuple[str, str]], *args: Any) -> Any:
            return start(status, [*headers, ("Connection", "close")], *args)

        if self.drops:
            self.drops -= 1
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            start("200 OK", [])
            return []
        return list(self._serve(environ, start_and_close))


class GoogleServer(S3Server):
    """Understands what clients of Google Cloud Storage send by its XML API.

    That is S3 under other headers: it shows what is sent, not what Google makes of it.
    """

    scheme = "gs"

    def __init__(self, directory: Path) -> None:
        super().__init__()
        account = {"gcs_base_url": self.address, "disable_oauth": True}
        account |= dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
        path = directory / "account.json"
        path.write_text(json.dumps(account))
        self.environment = {"GOOGLE_SERVICE_ACCOUNT": str(path), "GOOGLE_ALLOW_HTTP": "true"}

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        generation = environ.pop("HTTP_X_GOOG_IF_GENERATION_MATCH", None)
        if generation == "0":
            environ["HTTP_IF_NONE_MATCH"] = "*"
        elif generation is not None:
            environ["HTTP_IF_MATCH"] = f'"{int(generation):032x}"'

        def start_with_generation(status: str, headers: list[tuple[str, str]], *args: Any) -> Any:
            for name, value in headers:
                if name.lower() == "etag":  # of 128 bits in hex
                    headers = [*headers, ("x-goog-generation", str(int(value.strip('"'), 16)))]
            return start(status, headers, *args)

        if (source := environ.pop("HTTP_X_GOOG_COPY_SOURCE", None)) is not None:
            environ["HTTP_X_AMZ_COPY_SOURCE"] = source
        unknown = [name for name in environ if name.startswith("HTTP_X_GOOG_")]
        assert unknown in ([], ["HTTP_X_GOOG_USER_PROJECT"]), unknown
        environ["HTTP_AUTHORIZATION"] = (
            "AWS4-HMAC-SHA256 Credential=name/20260101/us-east-1/s3/aws4_request, "
            "SignedHeaders=host, Signature=none"
        )
        return super()._answer(environ, start_with_generation)


class AzureServer:
    """Azurite, Microsoft's emulator (``npm install azurite``), in a process of its own.

    Parameters
    ----------
    program : str
        Its ``azurite-blob``.
    """

    _ACCOUNT = "devstoreaccount1"  # Azurite's own, and its key: both are public
    _KEY = (
        "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
    )

    def __init__(self, program: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._process = subprocess.Popen(
            [
                *(program, "--blobPort", str(self._port), "--inMemoryPersistence", "--silent"),
                *("--skipApiVersionCheck", "--disableTelemetry"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        container = f"container-{uuid.uuid4().hex}"
        try:
            self._make_container(container)
        except BaseException:
            self.close()
            raise
        self.url = f"az://{container}"
        self.environment: Mapping[str, str] = {
            "AZURE_STORAGE_USE_EMULATOR": "true",
            "AZURITE_BLOB_STORAGE_URL": f"http://127.0.0.1:{self._port}",
            "AZURE_ALLOW_HTTP": "true",
            "AZURE_STORAGE_ACCOUNT_NAME": self._ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": self._KEY,
        }

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()

    def _make_container(self, name: str) -> None:
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2023-11-03"}
        told = "".join(f"{key}:{value}\n" for key, value in headers.items())
        account = self._ACCOUNT
        text = "PUT" + "\n" * 12 + f"{told}/{account}/{account}/{name}\nrestype:container"
        digest = hmac.digest(base64.b64decode(self._KEY), text.encode(), hashlib.sha256)
        headers["Authorization"] = f"SharedKey {account}:{base64.b64encode(digest).decode()}"
        while True:
            assert self._process.poll() is None, "Azurite has ended"
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
            try:
                connection.request("PUT", f"/{account}/{name}?restype=container", headers=headers)
                assert connection.getresponse().status == 201
                return
            except OSError:  # it does not listen yet
                continue
            finally:
                connection.close()
