"""Work that a request needs before its row begins: off the actor, in an order of service of its own."""
