"""docs/structure.md shows the code as it is."""

from __future__ import annotations

from tools import pages, structure_drawing


def test_the_drawing_of_files_and_imports_is_current() -> None:
    """Whoever adds a file or an import runs `python -m tools`."""
    page = (pages.ROOT / structure_drawing.PAGE).read_text("utf-8")
    assert page == pages.filled(structure_drawing.PAGE, structure_drawing.parts()), "run: python -m tools"
