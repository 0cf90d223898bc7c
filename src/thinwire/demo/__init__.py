"""A live demonstration: a small byte-level GPT learns Python's standard library, once per algorithm."""
