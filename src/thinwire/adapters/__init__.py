"""Adapters take gradients, or changes of parameters, from a model, and write the means back."""
