"""Adapters take gradients from a model, and write the means back."""
