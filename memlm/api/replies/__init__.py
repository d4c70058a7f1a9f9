"""The text of an answer -> its content, the thought before it, and the calls of tools: whole, or as it comes."""
