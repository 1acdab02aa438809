"""The launcher: many models behind one command, each in a worker process of its own, loaded on demand."""
