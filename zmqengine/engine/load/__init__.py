"""From a directory to a loaded, probed and warmed-up model."""
