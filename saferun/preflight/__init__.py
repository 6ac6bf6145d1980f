"""What the hosts of a job found before it starts, laid together and judged. Pure."""
