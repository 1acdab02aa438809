"""A batch as the API shows it and as it is kept, and the lines of its input."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec import Struct, field

LINES_MAX = 50_000
"""As in OpenAI's API."""
ERRORS_MAX = 100
WINDOW_S = 24 * 60 * 60
ENDED = frozenset({"completed", "failed", "cancelled", "expired"})


class Counts(Struct):
    """Lines of a batch."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class LineError(Struct, frozen=True):
    """The reason why a batch cannot run, and the line at fault."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class LineErrors(Struct, frozen=True):
    """Errors in the list form of the API."""

    data: list[LineError]
    object: str = "list"


class BatchJob(Struct, kw_only=True):
    """The state of a batch. Times are seconds since 1970."""

    id: str
    endpoint: str
    input_file_id: str
    created_at: int
    object: str = "batch"
    errors: LineErrors | None = None
    completion_window: str = "24h"
    status: str = "in_progress"
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    expires_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelled_at: int | None = None
    request_counts: Counts = field(default_factory=Counts)
    metadata: dict[str, str] | None = None


class BatchLine(Struct, frozen=True):
    """One request of a batch."""

    custom_id: str
    url: str
    body: dict[str, object]
    method: str = "POST"


def faults(lines: Iterable[bytes], endpoint: str) -> tuple[int, list[LineError]]:
    """The number of lines and their errors, at most `ERRORS_MAX`."""
    wrong: list[LineError] = []
    names: set[str] = set()
    count = 0
    for count, text in enumerate(lines, 1):
        if len(wrong) >= ERRORS_MAX:
            break
        try:
            line = msgspec.json.decode(text, type=BatchLine)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            wrong.append(LineError("invalid_json_line", str(error)[:200], count))
            continue
        if (line.method, line.url) != ("POST", endpoint):
            wrong.append(LineError("invalid_url", f"the batch is for POST {endpoint}", count, "url"))
        if line.custom_id in names:
            wrong.append(LineError("duplicate_custom_id", "an earlier line has it", count, "custom_id"))
        names.add(line.custom_id)
    if not count:
        wrong.append(LineError("empty_file", "the file has no lines"))
    if count > LINES_MAX:
        wrong.append(LineError("too_many_lines", f"at most {LINES_MAX} lines"))
    return count, wrong
