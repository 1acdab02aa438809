"""The scheduler: which request runs next, which waits, which is preempted, and why."""
