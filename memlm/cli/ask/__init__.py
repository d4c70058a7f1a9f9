"""The commands that ask a model: answer, chat, generate, trace."""
