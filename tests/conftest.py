"""Settings of the whole suite."""

from __future__ import annotations

import os
import signal

from hypothesis import settings

# A shared or virtual CPU pauses at will: a slow example is not a failing one.
settings.register_profile("default", deadline=None, max_examples=50)
settings.register_profile("long", deadline=None, max_examples=3_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# A shell that starts the tests in the background has them ignore Ctrl-C, and so would the programs that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
