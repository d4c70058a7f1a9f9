"""Measurements behind the reports of memlm: a program of its own, outside of the package."""
