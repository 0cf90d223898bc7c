"""The fields of a record."""

from __future__ import annotations

__all__ = ["COUNTED", "FIELDS", "FORMAT"]

FORMAT = 1

# Of `Stats`, as differences.
COUNTED = (
    "messages",
    "message_bytes",
    "gradient_bytes",
    "arithmetic_seconds",
    "waiting_seconds",
    "exposed_seconds",
)

# By kind, beside "kind" and "step".
FIELDS = {
    "run": ("format", "name", "thinwire", "unix_seconds", "processes", "process_rank"),
    "plan": ("algorithm", "routes"),
    "step": ("seconds", "step_seconds", "steps", "skipped_steps", *COUNTED),
    "norms": ("relative_error", "error_norm"),
    "log": ("seconds",),
}
