"""One launch on this host: the loop, and the parts that live beside it."""
