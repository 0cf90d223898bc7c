"""The arithmetic between messages. `base` has its tables of functions; `dispatch` looks up who serves."""
