"""Checks of this machine's GPU and of the engine on it, for `zmqengine doctor --metal-report`."""
