"""`zmqengine demo`: two front-ends that share a worker, or a model that calls functions."""

from zmqengine.cli.commands.demo.two_streams import demo

__all__ = ["demo"]
