"""The files of a launch, and the process that alone writes them."""
