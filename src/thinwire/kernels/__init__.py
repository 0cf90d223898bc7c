"""The arithmetic between messages. `backend` has the tables of functions; `dispatch` chooses a backend."""
