"""Names of image features in the keys of the prefix cache: there an image's tokens are its contents."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from zmqengine.engine.interface import RowImage

# No token id has this bit.
_IMAGE = np.uint32(1 << 31)


def named(tokens: Sequence[int], images: Iterable[RowImage], token: int) -> np.ndarray:
    """`tokens` as uint32, the `token`s in the spans of `images` replaced by names that their contents alone decide.

    Names are a stream of 31 bits for each feature, made of the image's hash by SHAKE-128; all are 2^31 or more.
    """
    ids = np.array(tokens, np.uint32)
    for image in images:
        span = ids[image.at : image.at + image.tokens]
        places = np.flatnonzero(span == token)
        stream = hashlib.shake_128(image.hash).digest(4 * len(places))
        span[places] = np.frombuffer(stream, "<u4") | _IMAGE
    return ids
