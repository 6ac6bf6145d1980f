"""What touches the operating system: one file a feature, each with what it answers where the system lacks it."""
