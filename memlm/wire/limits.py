"""Limits and intervals on which client and server agree."""

DEFAULT_MAX_MESSAGE_BYTES = 16 << 20
KEEPALIVE_S = 30
