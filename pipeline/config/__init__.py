"""The configuration: its sections, the origin of each value, and the options of all commands."""
