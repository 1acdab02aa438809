"""The errors of `zmqengine.errors`, so that a front-end imports from one package."""

from zmqengine.errors import *  # noqa: F403 - each of them, and whatever is added
