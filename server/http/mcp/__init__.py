"""The tools and resources of MCP, for agents: over HTTP at /mcp, and over stdio (`memlm mcp`)."""
