"""The only room with torch: the store, and whatever else needs torch, in a process of its own."""
