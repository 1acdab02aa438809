"""Room for the bodies of all requests together."""

from __future__ import annotations

import pytest

from zmqengine.errors import Overloaded
from zmqengine_http.serving.body_room import BodyRoom


def test_a_body_may_take_a_quarter_of_what_others_leave() -> None:
    """What has come of it already is its own, and takes no room from it."""
    room = BodyRoom(1000)
    room.check(250)
    with pytest.raises(Overloaded, match="over 250: try again"):
        room.check(251)
    room.held = 600
    room.check(100)
    with pytest.raises(Overloaded, match="take 600 of 1000 bytes"):
        room.check(101)
    room.check(150, held=200)
    with pytest.raises(Overloaded, match="take 400 of 1000 bytes"):
        room.check(151, held=200)
