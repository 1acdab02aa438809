"""The worker as a process: supervisor, watchdog, signals, logs and its share of the machine's memory."""
