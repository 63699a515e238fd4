"""A tiny image that borrows /usr from the host, for the real Apptainer; and a registry that serves one on loopback."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

PREFIX = Path("/opt/apptainer/usr/bin")  # where `make container-packages` puts it
ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("usr", "etc", "proc", "sys", "dev", "tmp", "root", "run", "var", "opt", "home", "mnt")
FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/bash\n",
    "etc/group": "root:x:0:\n",
    "etc/nsswitch.conf": "hosts: files\n",
}


def missing() -> str | None:
    """Why images can't be run here."""
    program = shutil.which("apptainer", path=f"{PREFIX}:{os.environ['PATH']}")
    if program is None:
        return "Apptainer (root on Debian: make container-packages)"
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60)
    except OSError as error:
        return f"an Apptainer that starts ({error})"
    return None if done.returncode == 0 else f"an Apptainer that starts ({done.stderr.strip()})"


def path() -> str:
    return f"{PREFIX}:{os.environ['PATH']}"


def root(folder: Path) -> Path:
    """What the image holds: empty folders, links into /usr, and the few files that programs look for."""
    root = folder / "root"
    for name in FOLDERS:
        (root / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    for name, text in FILES.items():
        (root / name).write_text(text)
    return root


def make(folder: Path) -> Path:
    """Build the image."""
    image = folder / "tiny.sif"
    environ = {**os.environ, "PATH": path(), "APPTAINER_CACHEDIR": str(folder / "cache")}
    subprocess.run(["apptainer", "build", str(image), str(root(folder))], env=environ, check=True, capture_output=True)
    return image


def settings(image: Path) -> str:
    """A job file for it: the tests' own Python and this project, bound from the host."""
    folders = {str(ROOT), sys.prefix} | ({sys.base_prefix} if not sys.base_prefix.startswith("/usr") else set())
    binds = ["/usr:/usr:ro", *sorted(folders)]
    return (
        f"device: cpu\npython: {sys.executable}\ncontainer:\n  image: {image}\n"
        f"  binds: [{', '.join(json.dumps(bind) for bind in binds)}]\n"
    )


def skip_or_pass() -> None:
    reason = missing()
    if reason:
        pytest.skip(f"NOT TESTED in a real container: this machine lacks {reason}")


class _Registry(BaseHTTPRequestHandler):
    """As much of the registry protocol (OCI distribution, v2) as a pull needs."""

    content: dict[str, tuple[str, bytes]]

    def do_GET(self) -> None:
        kind, data = self.content.get(self.path, ("text/plain", b""))
        self.send_response(200 if self.path in self.content else 404)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Docker-Content-Digest", _digest(data))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@contextmanager
def registry(name: str, files: dict[str, str]) -> Iterator[str]:
    """Serve one image of `files` on loopback; gives its address."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as layer:
        for path_, text in files.items():
            entry = tarfile.TarInfo(path_)
            entry.size = len(text)
            layer.addfile(entry, io.BytesIO(text.encode()))
    layer_data = gzip.compress(raw.getvalue())
    diff = {"type": "layers", "diff_ids": [_digest(raw.getvalue())]}
    config = json.dumps({"architecture": "amd64", "os": "linux", "config": {}, "rootfs": diff}).encode()
    kinds = "application/vnd.oci.image"

    def part(kind: str, data: bytes) -> dict[str, object]:
        return {"mediaType": f"{kinds}.{kind}", "digest": _digest(data), "size": len(data)}

    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": f"{kinds}.manifest.v1+json",
            "config": part("config.v1+json", config),
            "layers": [part("layer.v1.tar+gzip", layer_data)],
        }
    ).encode()
    content = {"/v2/": ("application/json", b"{}")}
    for tag in ("1", _digest(manifest)):
        content[f"/v2/{name}/manifests/{tag}"] = (f"{kinds}.manifest.v1+json", manifest)
    for data in (config, layer_data):
        content[f"/v2/{name}/blobs/{_digest(data)}"] = ("application/octet-stream", data)
    handler = type("Handler", (_Registry,), {"content": content})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"docker://127.0.0.1:{server.server_port}/{name}:1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
