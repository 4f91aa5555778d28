"""Environments: the text protocol, the built-in tasks, and how a user's own is found."""
