"""Attention: the places that a token sees, and memories of those beyond them."""
