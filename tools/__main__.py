"""Makes anew what is made from something else."""


sync_half.write()
pages.write(phase_drawings.PAGE, phase_drawings.parts())
