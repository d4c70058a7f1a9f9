"""DEMix and Branch-Train-Merge (arXiv 2108.05036, 2208.03306): experts of domains, and mixtures of models."""
