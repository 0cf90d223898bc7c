"""`thinwire check`: does Thinwire work on these processes, this backend, these devices?"""
