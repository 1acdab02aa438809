"""Traits of the device, for modules that must not name a back-end."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """Traits of the device, chosen when the engine opens; the defaults are a CPU's.

    `is_gpu`: it computes asynchronously to the host. `keeps_buffers`: unused memory is not released between requests,
    since mapping it again takes some 50 ms. `rests`: it lowers its clock when idle. `drafts_by_default`: speculation
    was measured on such devices.
    """

    is_gpu: bool = False
    keeps_buffers: bool = False
    rests: bool = False
    drafts_by_default: bool = True


CPU = Device()
