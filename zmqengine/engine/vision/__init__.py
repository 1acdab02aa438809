"""Vision: images to features, computed between steps and kept by content."""
