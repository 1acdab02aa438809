"""The performance sections of two README.md, from kept reports: `python -m benchmarks.readme`.

What stands between the two markers is replaced; running it again changes nothing. The one of the
project gets one table and one picture, the one beside the reports all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import click

from zmqengine.bench.reports.report import BenchReport, errors_of, failures_of, load
from zmqengine.bench.reports.tables import machine_line, markdown, model_line, ratio_line, tables_of
from zmqengine.bench.targets.target import TargetError

BEGIN = "<!-- performance: begin, made by python -m benchmarks.readme -->"
END = "<!-- performance: end -->"


class Chapter(NamedTuple):
    """One report of the suite: its heading, and the beginnings of the titles of the tables that are shown."""

    name: str
    heading: str
    tables: tuple[str, ...]


SUMMARY = Chapter("users-25m", "Users who wait for their answer", ("users: tokens/s",))
"""What README.md shows."""
CHAPTERS = (
    Chapter(
        "users-25m",
        "Users who wait for their answer",
        ("users: tokens/s", "users: TTFT p50", "users: TTFT max", "users: ITL p99"),
    ),
    Chapter(
        "overhead-0.2m",
        "What the worker, the wire and the client cost",
        ("overhead: tokens/s", "overhead: pass outside", "admission", "idle"),
    ),
    Chapter("overhead-pico", "The same on the bundled model", ("overhead: tokens/s",)),
    Chapter(
        "overhead-25m",
        "The same with 23 million weights, and 200 requests at once",
        ("overhead: tokens/s", "overhead: server CPU"),
    ),
    Chapter("users-0.2m", "When the model costs nothing", ("users: tokens/s", "users: TTFT max")),
    Chapter("shapes-25m", "Bursts, shared prefixes, agents, a trace", ("burst", "prefix", "agents", "trace")),
    Chapter(
        "stress-25m",
        "A long prompt beside running streams, and 200 requests at once",
        ("interference", "overload"),
    ),
    Chapter(
        "front-ends-25m",
        "Many client processes, slow and stopped ones among them",
        ("front-ends: tokens/s", "front-ends: ITL p99", "front-ends: slow"),
    ),
    Chapter("cancel-25m", "Readers who leave", ("cancel",)),
    Chapter("two-models-25m", "Two models on one machine", ("two-models",)),
)


def summary(results: Path) -> str:
    """The text between the markers of README.md, which stands in the directory above. Raises TargetError."""
    path = results / f"{SUMMARY.name}.json"
    if not path.is_file():
        raise TargetError(f"{path} is missing: `python -m benchmarks.suite --out {results}` makes it")
    report = load(path)
    lines = [BEGIN, "", *_tables(SUMMARY, report)]
    lines += [
        f"{_sentence(model_line(report))} {_sentence(_short(machine_line(report)))} Ratios are to {report.base}."
    ]
    lines += [
        f"How it was measured, and everything else: [{results.name}/README.md]({results.name}/README.md).",
        "",
    ]
    if (results / f"{SUMMARY.name}.svg").is_file():
        lines += [f"![{SUMMARY.heading}]({results.name}/{SUMMARY.name}.svg)", ""]
    return "\n".join([*lines, END])


def section(results: Path) -> str:
    """The text between the markers of the page beside the reports. Raises TargetError if there is no report."""
    found = [
        (chapter, load(path)) for chapter in CHAPTERS if (path := results / f"{chapter.name}.json").is_file()
    ]
    if not found:
        raise TargetError(
            f"{results} has no reports: `python -m benchmarks.suite --out {results}` makes them"
        )
    lines = [BEGIN, "", *_head([report for _, report in found], results)]
    for chapter, report in found:
        lines += _chapter(
            chapter, report, f"{chapter.name}.svg" if (results / f"{chapter.name}.svg").is_file() else ""
        )
    return "\n".join([*lines, END])


def _head(reports: Sequence[BenchReport], results: Path) -> Iterator[str]:
    yield f"Measured with `python -m benchmarks.suite --out {results.name}`, targets in turn, round by round, on:"
    yield ""
    yield from dict.fromkeys(f"- {report.started_at[:10]}, {machine_line(report)}" for report in reports)
    yield ""
    yield f"{_sentence(ratio_line(reports[0]).partition(';')[0])} TTFT is the time to the first token,"
    yield "ITL the time between neighbouring tokens of a stream."
    yield ""


def _chapter(chapter: Chapter, report: BenchReport, picture: str) -> Iterator[str]:
    yield f"### {chapter.heading}"
    yield ""
    yield f"{_sentence(model_line(report))} Ratios are to {report.base}, round by round."
    yield ""
    yield from _tables(chapter, report)
    remarks = [*report.notes, *(f"not measured: {line}" for line in errors_of(report.cells))]
    remarks += [f"failed: {line}" for line in failures_of(report.cells)]
    yield from (f"- {remark}" for remark in remarks)
    if remarks:
        yield ""
    if picture:
        yield f"![{chapter.heading}]({picture})"
        yield ""


def _tables(chapter: Chapter, report: BenchReport) -> Iterator[str]:
    for table in tables_of(report):
        if table.title.startswith(chapter.tables):
            yield markdown(table)
            yield ""


def _short(machine: str) -> str:
    """The machine without its versions."""
    return machine.partition(";")[0]


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def rewrite(text: str, new_section: str) -> str:
    """`text` with its section replaced. Raises TargetError if the markers are not there, once and in order."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end) or BEGIN in after:
        raise TargetError(f"the page needs these two lines, once: {BEGIN} and {END}")
    return before + new_section + after


@click.command()
@click.option("--results", type=click.Path(path_type=Path, file_okay=False), default=Path("benchmarks"))
@click.option(
    "--readme", type=click.Path(path_type=Path, dir_okay=False, exists=True), default=Path("README.md")
)
def main(results: Path, readme: Path) -> None:
    """Rewrite the performance sections of the README and of the page beside the kept reports."""
    for page, text in ((readme, summary(results)), (results / "README.md", section(results))):
        page.write_text(rewrite(page.read_text(encoding="utf-8"), text), encoding="utf-8")


if __name__ == "__main__":
    main()
