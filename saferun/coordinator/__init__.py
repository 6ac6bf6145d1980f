"""The only room with torch: the stores, the rendezvous, and what hosts tell each other, in a process of its own.

Nothing imports it, and nothing here decides about ranks: it says what it was asked and what it has heard. What it
imports of torch it imports late, and as little as works.
"""
