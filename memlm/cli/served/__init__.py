"""The commands of a server alone: its facts, operations and sessions."""
