"""Backends: each turns the common contract into calls of one kernel library."""
