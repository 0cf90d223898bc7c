"""Fronts: where gradients, or changes of parameters, come from and go back to."""
