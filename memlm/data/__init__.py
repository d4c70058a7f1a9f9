"""Texts into documents, tokens and windows."""
