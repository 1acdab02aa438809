"""Makes anew what is made from something else."""

from tools import pages, phase_drawings, sync_half

sync_half.write()
pages.write(phase_drawings.PAGE, phase_drawings.parts())
