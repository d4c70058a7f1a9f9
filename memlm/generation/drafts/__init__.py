"""Drafts: guesses of the next tokens that one pass of the model can check."""
