"""Documents into a trained model."""
