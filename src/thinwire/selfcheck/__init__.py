"""`thinwire check`: does it work on these processes, this backend, these devices?"""
