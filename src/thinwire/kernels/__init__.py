"""The arithmetic between messages. `base` has the tables of functions; `dispatch` chooses a backend."""
