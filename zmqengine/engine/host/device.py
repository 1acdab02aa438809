"""Traits of the device that computes, for what must not name a back-end."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """Chosen when the engine opens; by default those of a CPU.

    `is_gpu`: it computes beside the host, which only starts its work. `keeps_buffers`: memory is not given back
    between requests, since to map it again takes some 50 ms. `rests`: it slows its clock when it has nothing to do.
    `drafts_by_default`: drafts were measured on such a device.
    """

    is_gpu: bool = False
    keeps_buffers: bool = False
    rests: bool = False
    drafts_by_default: bool = True


CPU = Device()
