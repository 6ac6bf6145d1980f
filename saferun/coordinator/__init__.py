"""The only room with torch: the stores, the rendezvous, and the messages between hosts, in a process of its own.

Nothing imports it, and nothing here decides about ranks: it answers requests and reports what it receives. What it
imports of torch it imports late, and as little as works.
"""
