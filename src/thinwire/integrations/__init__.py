"""Shells around other frameworks; each needs its own optional package."""
