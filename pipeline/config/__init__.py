"""The configuration: its sections, where each value comes from, and the options of every command."""
