"""Conformance of a worker to the protocol: every rule of SPEC.md visible from outside, tried on a running worker.

`zmqengine conformance --address ADDRESS` prints one line for each rule. It uses sockets and maps alone and shares no
code with the worker or the client library, so that it judges a worker in any language by SPEC.md.
"""

from __future__ import annotations

from zmqengine.conformance.rules import Rule
from zmqengine.conformance.trial import Outcome, check

__all__ = ["Outcome", "Rule", "check"]
