"""The `rose` command: what each subcommand takes, and what it does."""
