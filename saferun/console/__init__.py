"""Output: splits, prefixes, writes."""
