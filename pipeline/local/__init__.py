"""A run on this machine: its broker, the fork server, the supervisor, `rose up` and `rose demo`."""
