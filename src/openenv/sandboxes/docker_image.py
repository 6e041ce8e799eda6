"""An image without a registry: the host's own system, read-only, in a container.

The image holds only empty folders, a user and links, and is made in a moment; what is to be seen of the host is bound
into each container. For machines that cannot pull images. Knows the engine's command line and the host's folders.
"""

from __future__ import annotations

import hashlib
import io
import os
import sys
import tarfile
from pathlib import Path

from openenv.sandboxes.base import Mount
from openenv.sandboxes.docker_engine import Engine

HOST_IMAGE = "host"
"""The name that asks for this image."""

_FOLDERS = ("dev", "etc", "home", "mnt", "opt", "proc", "root", "run", "srv", "sys", "tmp", "usr", "var", "var/tmp")
_SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_FROM_ETC = (
    *("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "mime.types", "ca-certificates"),
    *("ssl/certs", "ssl/openssl.cnf", "pki/tls/certs", "pki/ca-trust/extracted"),
)
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:/home/user:/bin/sh\n",
    "etc/group": "root:x:0:\nuser:x:1000:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}


def ensure_host_image(engine: Engine) -> str:
    """Return the name of the image, which is made first where the engine does not have it."""
    content = _rootfs()
    name = f"openenv-host:{hashlib.sha256(content).hexdigest()[:12]}"
    if engine.ask("image", "inspect", name).returncode != 0:
        engine.tell("import", "-", name, data=content)
    return name


def host_mounts() -> tuple[Mount, ...]:
    """Return what containers of the image see of the host: its programs and libraries, and the running Python."""
    wanted = [Path("/usr"), *(Path("/", name) for name in _SYSTEM), *(Path("/etc", name) for name in _FROM_ETC)]
    found = [path for path in wanted if path.exists() and not (path.is_symlink() and path.parent == Path("/"))]
    for place in dict.fromkeys([sys.base_prefix, sys.base_exec_prefix]):
        python = Path(place).resolve()
        if not any(python == seen or seen in python.parents for seen in found):
            found.append(python)
    return tuple(Mount(path.resolve(), str(path)) for path in found)


def host_environment() -> dict[str, str]:
    """Return the variables of containers of the image: the running Python is found first where it is not in `/usr`."""
    python = Path(sys.base_prefix).resolve()
    elsewhere = Path("/usr") not in [python, *python.parents]
    return {"PATH": f"{python}/bin:{_PATH}" if elsewhere else _PATH, "LANG": "C.UTF-8"}


def _rootfs() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name in _FOLDERS:
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o1777 if name in ("tmp", "var/tmp") else 0o755
            tar.addfile(folder)
        for name in _SYSTEM:
            here = Path("/", name)
            if here.is_symlink():
                link = tarfile.TarInfo(name)
                link.type, link.linkname = tarfile.SYMTYPE, os.readlink(here)
                tar.addfile(link)
        for name, text in _FILES.items():
            file = tarfile.TarInfo(name)
            file.size, file.mode = len(text), 0o644
            tar.addfile(file, io.BytesIO(text.encode()))
    return out.getvalue()
