"""The parameters of `Sampling` as fields of a request's body: one that is new there is a field here by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import NODEFAULT, Struct

from zmqengine.sampling_params import Sampling

if TYPE_CHECKING:

    class SamplingFields(Struct, frozen=True, kw_only=True):
        """Every field of `Sampling`, with its bounds and its default."""

else:

    def _default(field: msgspec.structs.FieldInfo) -> Any:
        if field.default is not NODEFAULT:
            return field.default
        return msgspec.field(default_factory=field.default_factory)

    SamplingFields = msgspec.defstruct(
        "SamplingFields",
        [(field.name, field.type, _default(field)) for field in msgspec.structs.fields(Sampling)],
        frozen=True,
        kw_only=True,
    )


def sampling_given(fields: SamplingFields) -> dict[str, Any]:
    """The parameters by name, without those that are None: they were left open."""
    return {
        name: value for name in Sampling.__struct_fields__ if (value := getattr(fields, name)) is not None
    }
