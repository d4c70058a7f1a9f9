"""Attention: what a token sees, and memories of what it no longer sees."""
