"""`python -m tools`: regenerate the generated files of this repository."""

from tools import http_fields, pages, phase_drawings, sync_half

sync_half.write()
pages.write(phase_drawings.PAGE, phase_drawings.parts())
pages.write(http_fields.PAGE, http_fields.parts())
