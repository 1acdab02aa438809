"""The table of request fields in docs/http-clients.md: `python -m tools.http_fields` prints it."""

from __future__ import annotations

from collections.abc import Sequence

from zmqengine_http.endpoint import Endpoint
from zmqengine_http.endpoints import ENDPOINTS

_FATES = {
    "supported": "supported: honoured, or a 400 that says why not",
    "refused": "refused: a 400 that names it",
    "foreign": "refused, or ignored with `--unknown-fields ignore`, unless the value changes nothing",
    "ignored": "ignored: accepted without effect",
    "reported": "ignored, and named in the header `x-ignored-fields` and the log",
}


def markdown_table(endpoints: Sequence[Endpoint]) -> str:
    """A table with a column for each endpoint and a row for each treatment of its fields."""
    bodies = [endpoint.body for endpoint in endpoints if endpoint.body]
    lines = [
        f"| | {' | '.join(f'`{endpoint.path}`' for endpoint in endpoints)} |",
        "|---" * (len(endpoints) + 1) + "|",
    ]
    for fate, title in _FATES.items():
        columns = [
            body.supported
            if fate == "supported"
            else [field.name for field in body.fields.values() if field.fate == fate]
            for body in bodies
        ]
        cells = [", ".join(f"`{name}`" for name in names) for names in columns]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


GENERATING = tuple(endpoint for endpoint in ENDPOINTS if endpoint.streams)

if __name__ == "__main__":
    print(markdown_table(GENERATING), end="")
