"""Fixtures of the tests on real parts."""
