"""What touches Linux: processes, signals, /proc, the network, limits."""
