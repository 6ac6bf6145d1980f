"""What is looked at before a rank is signalled: one file a capture, failures returned as values."""
