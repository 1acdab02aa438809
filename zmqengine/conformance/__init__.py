"""Does a worker keep the protocol? Every rule of SPEC.md that can be seen from outside, tried on a running worker.

`zmqengine conformance --address ADDRESS` prints one line for each rule. It speaks with sockets and maps alone and
shares no code with the worker or the client library, so that it judges a worker in any language by the page.
"""

from __future__ import annotations

from zmqengine.conformance.rules import Rule
from zmqengine.conformance.trial import Outcome, check

__all__ = ["Outcome", "Rule", "check"]
