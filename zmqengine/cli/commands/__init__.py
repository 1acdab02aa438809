"""One module or package for each command of `zmqengine`, with the command under its own name."""
