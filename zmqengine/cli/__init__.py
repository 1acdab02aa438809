"""The command line: one module for each command, imported when it is called."""

from zmqengine.python_child import leave_current_directory

# Before anything else is imported: this package is a program, and no library.
leave_current_directory()
