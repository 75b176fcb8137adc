"""An S3 server in memory whose answers take as long as they would from afar.

    python latent_s3.py PORT LATENCY_MS MB_PER_SECOND

Each request waits for the latency, and for its bytes at the rate of one connection. It knows what
a client of checkpoints and of Zarr asks for, checks no signature, and is for benchmarks only.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import sys
from email.utils import formatdate
from urllib.parse import unquote
from xml.sax.saxutils import escape, unescape

import tornado.web

OBJECTS: dict[str, tuple[bytes, str]] = {}
UPLOADS: dict[str, dict[int, bytes]] = {}
NUMBERS = itertools.count(1)


class Handler(tornado.web.RequestHandler):
    latency_seconds = 0.0
    bytes_per_second = 1e9

    async def prepare(self) -> None:
        self.key = unquote(self.request.path).lstrip("/")
        await self.wait(len(self.request.body))

    async def wait(self, nbytes: int) -> None:
        await asyncio.sleep(self.latency_seconds + nbytes / self.bytes_per_second)

    def put(self) -> None:
        source = self.request.headers.get("x-amz-copy-source")
        upload = self.get_query_argument("uploadId", None)
        if upload is not None:
            UPLOADS[upload][int(self.get_query_argument("partNumber"))] = self.request.body
        elif source is not None:
            found = OBJECTS.get(unquote(source).lstrip("/"))
            if found is None:
                return self.send_error(404)
            OBJECTS[self.key] = (found[0], formatdate(usegmt=True))
            self.write("<CopyObjectResult><ETag>&quot;e&quot;</ETag></CopyObjectResult>")
        elif self.request.headers.get("If-None-Match") == "*" and self.key in OBJECTS:
            return self.send_error(412)
        else:
            OBJECTS[self.key] = (self.request.body, formatdate(usegmt=True))
        self.set_header("ETag", '"e"')

    def post(self) -> None:
        if "uploads" in self.request.query_arguments or self.request.query.startswith("uploads"):
            upload = str(next(NUMBERS))
            UPLOADS[upload] = {}
            name = "InitiateMultipartUploadResult"
            self.write(f"<{name}><UploadId>{upload}</UploadId></{name}>")
        elif upload := self.get_query_argument("uploadId", None):
            parts = UPLOADS.pop(upload)
            OBJECTS[self.key] = (b"".join(parts[i] for i in sorted(parts)), formatdate(usegmt=True))
            name = "CompleteMultipartUploadResult"
            self.write(f"<{name}><ETag>&quot;e&quot;</ETag></{name}>")
        else:
            keys = re.findall("<Key>(.*?)</Key>", self.request.body.decode())
            for key in keys:
                OBJECTS.pop(f"{self.key}/{unescape(key)}", None)
            deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
            self.write(f"<DeleteResult>{deleted}</DeleteResult>")

    async def get(self) -> None:
        if "/" not in self.key:
            return self.list()
        found = OBJECTS.get(self.key)
        if found is None:
            return self.send_error(404)
        data, modified = found
        size = len(data)
        if span := re.fullmatch(r"bytes=(\d+)-(\d+)", self.request.headers.get("Range", "")):
            start, stop = int(span[1]), min(int(span[2]) + 1, size)
            if start >= size:
                return self.send_error(416)
            data = data[start:stop]
            self.set_status(206)
            self.set_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.set_header("ETag", '"e"')
        self.set_header("Last-Modified", modified)
        self.set_header("Content-Length", str(len(data)))
        if self.request.method == "GET":
            await asyncio.sleep(len(data) / self.bytes_per_second)
            self.write(data)

    head = get

    def list(self) -> None:
        prefix = f"{self.key}/{self.get_query_argument('prefix', '')}"
        delimiter = self.get_query_argument("delimiter", None)
        objects, prefixes = [], {}
        for key in sorted(OBJECTS):
            if not key.startswith(prefix):
                continue
            name, _, rest = key[len(prefix) :].partition(delimiter or "\0")
            short = escape(key[len(self.key) + 1 :])
            if rest or (delimiter and key.endswith(delimiter)):
                folder = escape(f"{prefix}{name}/"[len(self.key) + 1 :])
                prefixes[f"<CommonPrefixes><Prefix>{folder}</Prefix></CommonPrefixes>"] = None
            else:
                objects.append(
                    f"<Contents><Key>{short}</Key><Size>{len(OBJECTS[key][0])}</Size>"
                    "<ETag>e</ETag><LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
                )
        found = "".join((*objects, *prefixes))
        self.write(f"<ListBucketResult><IsTruncated>false</IsTruncated>{found}</ListBucketResult>")

    def log_request(self) -> None:
        pass


async def main() -> None:
    port, latency, rate = sys.argv[1:]
    Handler.latency_seconds = float(latency) / 1e3
    Handler.bytes_per_second = float(rate) * 1e6
    application = tornado.web.Application([(r"/.*", Handler)], log_function=lambda _: None)
    application.listen(int(port), "127.0.0.1", max_buffer_size=1 << 30)
    print("listening", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
