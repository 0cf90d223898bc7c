"""Few of a gradient's entries: which are sent, how they are packed, and the averaging of what is sent so."""
