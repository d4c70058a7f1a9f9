"""Text in the prompt: prompts with budgets, answers from passages, chains of prompts, proposals for a repository."""
