"""How things are written for people, and what of them is not. Pure."""
