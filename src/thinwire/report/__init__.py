"""One HTML page that compares runs, from the files of their `Watch`."""
