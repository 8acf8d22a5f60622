"""Helpers that start real servers and processes for the tests."""
