"""The terminal screen: workers above, requests or front-ends below, and key bindings."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Static

from zmqengine.errors import ZmqEngineError
from zmqengine_client import AsyncClient
from zmqengine_client.launcher import AsyncLauncher
from zmqengine_metrics.snapshot import Snapshot
from zmqengine_top import rows
from zmqengine_top.history import WorkerHistory

Table = DataTable[Text]


class Top(App[None]):
    """Polls each worker every `every_s`. A silent worker keeps its row and is still polled.

    A `launcher` tells the states of models that it has not loaded.
    """

    CSS = """
    Screen { layout: vertical; }
    #workers { height: auto; max-height: 7; }
    #details { height: 4; padding: 0 1; color: $text-muted; }
    #requests, #sessions { height: 1fr; }
    #message { height: 1; padding: 0 1; }
    """
    ENABLE_COMMAND_PALETTE = False
    TITLE = "zmqengine top"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("s", "sort", "Sort"),
        Binding("f", "front_ends", "Front-ends"),
        Binding("a", "abort", "Abort"),
        Binding("d", "drain", "Drain"),
        Binding("tab", "app.focus_next", "Next table", show=False),
    ]

    def __init__(
        self,
        clients: Sequence[tuple[str, AsyncClient]],
        *,
        every_s: float = 1.0,
        launcher: AsyncLauncher | None = None,
    ) -> None:
        super().__init__()
        self.histories = [WorkerHistory(worker) for worker, _ in clients]
        self._clients = dict(clients)
        self._every_s = every_s
        self._launcher = launcher
        self._order = 0
        self._targets: dict[str, rows.RequestKey] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}

    def compose(self) -> ComposeResult:
        """The widgets, from top to bottom."""
        yield Table(id="workers", cursor_type="row", zebra_stripes=False)
        yield Static(id="details", markup=False)
        yield Table(id="requests", cursor_type="row", zebra_stripes=True)
        yield Table(id="sessions", cursor_type="row", zebra_stripes=True)
        yield Static(id="message", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        """Add the columns and start polling."""
        for name, columns in (
            ("workers", rows.WORKER_COLUMNS),
            ("requests", rows.REQUEST_COLUMNS),
            ("sessions", rows.SESSION_COLUMNS),
        ):
            for column in columns:
                self._table(name).add_column(column, key=column)
        self._table("sessions").display = False
        self._table("requests").focus()
        self._show()
        if self._launcher is not None:
            self._asking[""] = asyncio.create_task(self._follow(self._launcher))
        self.set_interval(self._every_s, self._look)
        self._look()

    async def on_unmount(self) -> None:
        """Cancel the polls in flight."""
        for asking in self._asking.values():
            asking.cancel()
        await asyncio.gather(*self._asking.values(), return_exceptions=True)

    def _look(self) -> None:
        # One poll in flight per worker, so that a slow worker delays no other.
        for history in self.histories:
            asking = self._asking.get(history.worker)
            if asking is None or asking.done():
                self._asking[history.worker] = asyncio.create_task(self._ask(history))

    async def _ask(self, history: WorkerHistory) -> None:
        client = self._clients[history.worker]
        try:
            snapshot = Snapshot(history.worker, await client.describe(), await client.status())
        except ZmqEngineError:
            snapshot = Snapshot(history.worker)
        history.take(snapshot, time.monotonic())
        self._show()

    async def _follow(self, launcher: AsyncLauncher) -> None:
        async for changes in launcher.watch():
            entries = {entry.name: entry for entry in changes.models}
            for history in self.histories:
                history.entry = entries.get(history.worker, history.entry)

    # --- display -------------------------------------------------------------------------------------------

    def _show(self) -> None:
        now_s = time.monotonic()
        _fill(self._table("workers"), [rows.worker_row(history, now_s) for history in self.histories])
        self._show_details()
        name, order = rows.ORDERS[self._order]
        lines = sorted(rows.request_lines(self.histories), key=order)
        self._targets = {line.target.key: line.target for line in lines}
        _fill(self._table("requests"), [rows.request_row(line) for line in lines])
        _fill(self._table("sessions"), rows.session_rows(self.histories))
        if not self._table("sessions").display:
            why = self._why(lines)
            self._say(f"{len(lines)} requests, by {name}{f'   {why}' if why else ''}")

    def _why(self, lines: Sequence[rows.Line]) -> str:
        """The worker's full reason why the request under the cursor waits; empty if it has none."""
        row = self._table("requests").cursor_row
        chosen = lines[row].info if 0 <= row < len(lines) else None
        return chosen.waits_for.partition(": ")[2] if chosen is not None else ""

    def _show_details(self) -> None:
        history = self._chosen()
        self.query_one("#details", Static).update("\n".join(rows.details(history)) if history else "")

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        """Show the details of the selected worker."""
        if event.data_table.id == "workers":
            self._show_details()

    def _say(self, text: str) -> None:
        self.query_one("#message", Static).update(text)

    def _table(self, name: str) -> Table:
        return self.query_one(f"#{name}", DataTable)

    def _chosen(self) -> WorkerHistory | None:
        row = self._table("workers").cursor_row
        return self.histories[row] if 0 <= row < len(self.histories) else None

    # --- keys ----------------------------------------------------------------------------------------------

    def action_sort(self) -> None:
        """Sort requests by the next column."""
        self._order = (self._order + 1) % len(rows.ORDERS)
        self._show()

    def action_front_ends(self) -> None:
        """Toggle between requests and front-ends."""
        requests, sessions = self._table("requests"), self._table("sessions")
        requests.display, sessions.display = sessions.display, requests.display
        (sessions if sessions.display else requests).focus()
        self._say("front-ends" if sessions.display else "")
        self._show()

    def action_abort(self) -> None:
        """Abort the request under the cursor, after confirmation."""
        table = self._table("requests")
        if not table.display or not table.row_count:
            self._say("no request is chosen")
            return
        key = table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value
        target = self._targets.get(key or "")
        if target is None:
            return
        client = self._clients[target.worker]

        async def end() -> None:
            await client.end_request(target.session, target.request)

        self.push_screen(
            Confirm(f"End request {target.request} of {target.worker}?"),
            lambda yes: self._act(end, f"{target.request}: asked to end") if yes else None,
        )

    def action_drain(self) -> None:
        """Drain the selected worker, after confirmation."""
        history = self._chosen()
        if history is not None:
            drain = self._clients[history.worker].drain
            self.push_screen(
                Confirm(f"Drain {history.worker}? It takes no new requests, and ends when the others have."),
                lambda yes: self._act(drain, f"{history.worker}: draining") if yes else None,
            )

    def _act(self, action: object, done: str) -> None:
        async def act() -> None:
            assert callable(action)
            try:
                await action()
                self.notify(done)
            except ZmqEngineError as error:
                self.notify(error.message, severity="error")

        self.run_worker(act(), exclusive=False)


def _fill(table: Table, lines: Sequence[rows.TableRow]) -> None:
    """Replace the rows; the cursor stays on the row with its key, or at its index."""
    cursor_row = table.cursor_row
    key = None
    if table.row_count and 0 <= cursor_row < table.row_count:
        key = table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value
    top = table.scroll_y
    table.clear()
    for line in lines:
        table.add_row(*(Text(cell) for cell in line.cells), key=line.key)
    keys = [line.key for line in lines]
    cursor_row = keys.index(key) if key in keys else min(cursor_row, len(keys) - 1)
    if cursor_row > 0:
        table.move_cursor(row=cursor_row, scroll=False)
    table.scroll_to(y=top, animate=False)


class Confirm(ModalScreen[bool]):
    """Asks `question`; only the key y confirms."""

    CSS = """
    Confirm { align: center middle; }
    Confirm > Static { width: auto; max-width: 90%; border: round $warning; padding: 0 2; background: $surface; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "Yes"),
        Binding("n,escape,q", "answer(False)", "No"),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        """The question and the keys that answer it."""
        yield Static(f"{self._question}  y / n", markup=False)

    def action_answer(self, yes: bool) -> None:
        """Close the dialog with this answer."""
        self.dismiss(yes)
