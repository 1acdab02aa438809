"""`python -m benchmarks.readme`: the measured figures in README.md and in benchmarks/README.md, from kept reports.

The text between the two markers of each page is replaced; running it again changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import click

from benchmarks import families
from zmqengine.bench.load.measures import kind_of
from zmqengine.bench.reports.report import BenchReport, Rounds, load
from zmqengine.bench.reports.tables import Table, machine_line, model_line, text_of
from zmqengine.bench.scenarios import chat
from zmqengine.bench.targets.target import TargetError

BEGIN = "<!-- performance: begin, made by python -m benchmarks.readme -->"
END = "<!-- performance: end -->"
USERS, CHAT, FAMILIES = "users-25m", "chat-25m", "families-25m"
GPU_CHATS = ("gpu-8b-chat", "gpu-8b-4bit-chat", "gpu-moe-chat")
SOME_USERS = "8"
"""The number of users by which README compares servers: with more the others fall behind."""


class Line(NamedTuple):
    """One line of the table of benchmarks/README.md: a measure of one case in one report."""

    report: str
    scenario: str
    case: str
    measure: str


LINES = (
    *(
        Line(CHAT, "chat", case, measure)
        for measure in ("tokens_per_s", "ttft_p50_ms", "ttft_p99_ms", "silence_max_ms")
        for case in ("1", "4", "8", "16")
    ),
    *(Line(USERS, "users", case, "tokens_per_s") for case in ("1", "8", "32", "64")),
    *(Line(USERS, "users", case, "ttft_p50_ms") for case in ("1", "8", "32", "64")),
    Line(USERS, "users", "32", "itl_p99_ms"),
    Line("shapes-25m", "burst", "4 users x 4", "ttft_p50_ms"),
    Line("shapes-25m", "prefix", "together", "ttft_p50_ms"),
    Line("shapes-25m", "agents", "4 agents x 6 turns", "ttft_later_p50_ms"),
    Line("shapes-25m", "trace", "sample_trace.jsonl x1", "e2e_p50_ms"),
    Line("stress-25m", "interference", "4096-token prompt, 4 streams", "silence_max_ms"),
    Line("stress-25m", "overload", "200 at once", "completed"),
    Line("front-ends-25m", "front-ends", "64", "tokens_per_s"),
    Line("cancel-25m", "cancel", "half of 8 streams", "slot_free_p50_ms"),
)


def summary(results: Path) -> str:
    """The text between the markers of README.md, in the directory above: what other servers do on the same work.

    Raises TargetError without its report.
    """
    report = load(_path(results, CHAT))
    rounds = Rounds(report)
    figures = [
        f"{label} {text_of(rounds.figure('chat', SOME_USERS, label, 'tokens_per_s'), 'tokens_per_s')}"
        for label in report.labels()
    ]
    lines = [
        f"Beside other servers, tokens a second of {SOME_USERS} such users on a CPU: {', '.join(figures)}.",
        _described(report),
        f"How it was measured, and more: [{results.name}/README.md]({results.name}/README.md).",
    ]
    return "\n".join([BEGIN, "", *lines, "", *_families(results), END])


def _families(results: Path) -> list[str]:
    """Lines of the table of families; none without its report."""
    path = results / f"{FAMILIES}.json"
    if not path.is_file():
        return []
    report = load(path)
    tokens = " to ".join(map(str, report.options["options"]["chat_answer_tokens"]))  # type: ignore[index]
    rounds = report.options["rounds"]
    machine = _sentence(machine_line(report).partition(";")[0])
    return [
        "Every family on a CPU: models of about 25M random weights in float32, four users who ask at once, prompts",
        f"as above, answers of {tokens} tokens. Times are processor time of the server alone, since other programs",
        "ran beside it: `python -m benchmarks.families`.",
        "",
        *families.table(report),
        "",
        f"{report.started_at[:10]}, {rounds} round{'' if rounds == 1 else 's'}. {machine}",
        "",
    ]


def _on_gpu(paths: Sequence[Path]) -> list[str]:
    """Lines of the chats of one server on a GPU, their measures by model and number of users; none without reports."""
    reports = [load(path) for path in paths if path.is_file()]
    if not reports:
        return []
    # The first minute is the only one.
    measures = [measure for measure in chat.SCENARIO.shown if not measure.startswith("first_")]
    heads = [""]
    rows = [[kind_of(measure).heading] for measure in measures]
    for report in reports:
        (label,), rounds = report.labels(), Rounds(report)
        name, dtype = report.model.name.partition(",")[0], report.model.dtype
        for case in report.cases("chat"):
            heads.append(f"{name} {dtype}, {case}")
            for row, measure in zip(rows, measures, strict=True):
                row.append(text_of(rounds.figure("chat", case, label, measure), measure))
    first = reports[0]
    device = first.targets[0].facts["device"].removeprefix("gpu (").removesuffix(")")
    minute_s = float(str(first.options["chat_minute_s"]))
    dates = sorted({report.started_at[:10] for report in reports})
    # The note on random weights is the same for all.
    others = [model_line(report).partition(", random weights")[0] for report in reports[1:]]
    models = " ".join(map(_sentence, [model_line(first), *others]))
    return [
        f"Chats through the HTTP front-end on one {device}, in the first {minute_s:.0f} s after a start:",
        "",
        markdown(Table("chat", heads, rows)),
        "",
        f"{', '.join(dates)}. {models} {_sentence(machine_line(first).partition(';')[0])}",
        "",
    ]


def _described(report: BenchReport) -> str:
    machine = _sentence(machine_line(report).partition(";")[0])
    return f"{report.started_at[:10]}. {_sentence(model_line(report))} {machine} Ratios are to {report.base}."


def section(results: Path) -> str:
    """The text between the markers of benchmarks/README.md: one table over the reports there are.

    Raises TargetError without the first report.
    """
    first = load(_path(results, USERS))
    names = dict.fromkeys(line.report for line in LINES)
    reports = {name: load(results / f"{name}.json") for name in names if (results / f"{name}.json").is_file()}
    labels = list(dict.fromkeys(label for report in (first, *reports.values()) for label in report.labels()))
    rows = [_row(line, reports[line.report], labels) for line in LINES if line.report in reports]
    table = Table("Two CPU cores", ["", *labels], rows)
    dates = sorted({report.started_at[:10] for report in reports.values()})
    return "\n".join(
        [
            BEGIN,
            "",
            markdown(table),
            "",
            f"{', '.join(dates)}. {_sentence(model_line(first))} {_sentence(machine_line(first))}",
            "",
            *_on_gpu([results / f"{name}.json" for name in GPU_CHATS]),
            END,
        ]
    )


def _row(line: Line, report: BenchReport, labels: list[str]) -> list[str]:
    rounds = Rounds(report)
    figures = [rounds.figure(line.scenario, line.case, label, line.measure) for label in labels]
    name = f"{line.scenario}, {line.case}: {kind_of(line.measure).heading}"
    return [name, *(text_of(figure, line.measure) for figure in figures)]


def _path(results: Path, name: str) -> Path:
    path = results / f"{name}.json"
    if not path.is_file():
        raise TargetError(f"{path} is missing: `python -m benchmarks.suite --out {results}` makes it")
    return path


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def rewrite(text: str, new_section: str) -> str:
    """`text` with its section replaced. Raises TargetError unless the markers are there, once and in order."""
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
    """Rewrite the measured figures of README.md and of the page beside the kept reports."""
    for page, text in ((readme, summary(results)), (results / "README.md", section(results))):
        page.write_text(rewrite(page.read_text(encoding="utf-8"), text), encoding="utf-8")


def markdown(table: Table) -> str:
    """The table in GitHub's Markdown, its title in bold before it."""
    head = "| " + " | ".join(table.columns) + " |"
    rule = "|" + "---|" + "---:|" * (len(table.columns) - 1)
    rows = ["| " + " | ".join(row) + " |" for row in table.rows]
    return "\n".join([f"**{table.title}**", "", head, rule, *rows])


if __name__ == "__main__":
    main()
