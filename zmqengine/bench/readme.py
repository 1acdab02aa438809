"""The README's performance section, from kept reports: `python -m zmqengine.bench.readme`.

What stands between the two markers is replaced; running it again changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from zmqengine.bench.report import Report, errors_of, load
from zmqengine.bench.tables import markdown, preface, tables_of
from zmqengine.bench.targets import TargetError

BEGIN = "<!-- performance: begin, made by python -m zmqengine.bench.readme -->"
END = "<!-- performance: end -->"

# Of each report the tables whose titles begin so; the whole of a report is one click away.
SHOWN: dict[str, tuple[str, ...]] = {
    "overhead-0.2m": ("overhead: tokens/s", "overhead: pass outside", "admission", "idle"),
    "overhead-pico": ("overhead: tokens/s",),
    "users-0.2m": ("users: tokens/s",),
    "users-25m": ("users: tokens/s", "users: TTFT max", "users: ITL p99"),
    "shapes-25m": ("burst", "prefix", "agents", "trace"),
    "stress-25m": ("interference", "overload", "front-ends: tokens/s", "front-ends: hindered"),
    "cancel-25m": ("cancel",),
    "two-models-25m": ("two-models",),
}


def section(results: Path, readme: Path) -> str:
    """The text between the markers. Raises TargetError if there is no report."""
    lines = [BEGIN, ""]
    for name, titles in SHOWN.items():
        path = results / f"{name}.json"
        if path.is_file():
            lines += _part(load(path), path, readme, titles)
    if len(lines) == 2:
        raise TargetError(f"{results} has no reports: `zmqengine bench suite --out {results}` makes them")
    return "\n".join([*lines, END])


def _part(report: Report, path: Path, readme: Path, titles: tuple[str, ...]) -> Iterator[str]:
    picture = path.with_suffix(".svg")
    yield f"### {path.stem}"
    yield ""
    yield (
        f"{report.started_at[:10]}. "
        + ". ".join(line[0].upper() + line[1:] for line in preface(report))
        + "."
    )
    yield ""
    for table in tables_of(report):
        if table.title.startswith(titles):
            yield markdown(table)
            yield ""
    for line in errors_of(report.cells):
        yield f"- not measured: {line}"
    if picture.is_file():
        yield f"![{path.stem}]({picture.resolve().relative_to(readme.resolve().parent).as_posix()})"
        yield ""


def rewrite(text: str, new_section: str) -> str:
    """`text` with its section replaced. Raises TargetError if the markers are not there, once and in order."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end) or BEGIN in after:
        raise TargetError(f"the README needs these two lines, once: {BEGIN} and {END}")
    return before + new_section + after


@click.command()
@click.option("--results", type=click.Path(path_type=Path, file_okay=False), default=Path("benchmarks"))
@click.option(
    "--readme", type=click.Path(path_type=Path, dir_okay=False, exists=True), default=Path("README.md")
)
def main(results: Path, readme: Path) -> None:
    """Rewrite the performance section of the README from kept reports."""
    text = readme.read_text(encoding="utf-8")
    readme.write_text(rewrite(text, section(results, readme)), encoding="utf-8")


if __name__ == "__main__":
    main()
