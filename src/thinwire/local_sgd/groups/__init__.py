"""Groups whose members come and go."""
