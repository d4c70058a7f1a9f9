"""The commands of what a server alone has: its facts, operations and sessions."""
