"""Readers of what tools print on a host. Each takes the text alone, and leaves out what it does not know."""
