"""Files of callers on disk: uploaded ones, and the results and errors of batches. Each caller finds its own."""

from __future__ import annotations

import email.parser
import email.policy
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from zmqengine.paths import replace_file
from zmqengine_http.serving.errors import ApiError, bad_field

OWNER_BYTES_MAX = 1 << 30
"""Maximum bytes of one caller's files: the disk is shared by all callers."""
FILE_ID = re.compile(r"file-[0-9a-f]{24}")
NOBODY = "local"
"""The owner where no keys are asked for."""


class StoredFile(Struct, frozen=True, kw_only=True):
    """A file as the API shows it."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    object: str = "file"
    status: str = "processed"


class Upload(NamedTuple):
    """The fields of a form: a file and its purpose."""

    name: str
    purpose: str
    data: bytes


class Storage:
    """The files of one caller, below `root`: for each its content, and its `StoredFile` as JSON."""

    def __init__(self, root: Path, owner: str) -> None:
        self._directory = root / "files" / (owner or NOBODY)

    def add(self, upload: Upload) -> StoredFile:
        """Keep an uploaded file. Raises a 413 when the caller's files would take too much."""
        if sum(file.bytes for file in self.all()) + len(upload.data) > OWNER_BYTES_MAX:
            raise ApiError(
                413,
                f"your files take more than {OWNER_BYTES_MAX} bytes: delete some",
                code="request_too_large",
            )
        id_ = new_id("file-")
        replace_file(self._directory / id_, upload.data)
        return self.describe(id_, upload.name, upload.purpose)

    def describe(self, id_: str, name: str, purpose: str) -> StoredFile:
        """Have a file whose content is there appear among the caller's."""
        size = self.path(id_).stat().st_size
        file = StoredFile(id=id_, bytes=size, created_at=int(time.time()), filename=name, purpose=purpose)
        replace_file(self._directory / f"{id_}.json", msgspec.json.encode(file))
        return file

    def all(self) -> list[StoredFile]:
        """Every file, the newest first."""
        found = [self._read(path) for path in self._directory.glob("file-*.json")]
        return sorted(found, key=lambda file: (file.created_at, file.id), reverse=True)

    def find(self, id_: str) -> StoredFile:
        """The file of this id. Raises a 404."""
        path = self._directory / f"{id_}.json"
        if FILE_ID.fullmatch(id_) is None or not path.exists():
            raise ApiError(404, f"No such File object: {id_[:100]}", param="id", code="not_found")
        return self._read(path)

    def path(self, id_: str) -> Path:
        """The path of a content."""
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        return self._directory / id_

    def delete(self, id_: str) -> None:
        """Delete a file. Raises a 404."""
        self.find(id_)
        self.path(f"{id_}.json").unlink(missing_ok=True)
        self.path(id_).unlink(missing_ok=True)

    def _read(self, path: Path) -> StoredFile:
        return msgspec.json.decode(path.read_bytes(), type=StoredFile)


def new_id(prefix: str) -> str:
    """A random id of 96 bits, which cannot be guessed."""
    return prefix + secrets.token_hex(12)


def uploaded(content_type: str, body: bytes) -> Upload:
    """The file in a form of type multipart/form-data. Raises a 400 or 415."""
    if not content_type.lower().startswith("multipart/form-data"):
        raise ApiError(415, "a file comes as multipart/form-data", code="unsupported_media_type")
    head = b"Content-Type: " + content_type.encode("latin-1") + b"\r\n\r\n"
    form = email.parser.BytesParser(policy=email.policy.HTTP).parsebytes(head + body)
    name, purpose, data = "", "", None
    for part in form.iter_parts() if form.is_multipart() else ():
        field = part.get_param("name", header="content-disposition")
        content = part.get_payload(decode=True)
        assert isinstance(content, bytes)
        if field == "file":
            name, data = part.get_filename() or "file", content
        elif field == "purpose":
            purpose = content.decode(errors="replace").strip()
    if data is None:
        raise bad_field("file", "the form has none")
    if purpose != "batch":
        raise bad_field("purpose", "files are kept for batches: say batch", code="unsupported_value")
    return Upload(name, purpose, data)


def lines_of(path: Path) -> Iterator[bytes]:
    """The lines of a file that are whole and not empty."""
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                yield line
