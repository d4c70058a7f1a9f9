"""What the commands share: their options, and what they read from and write to a terminal."""
