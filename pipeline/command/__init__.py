"""The `rose` command: configuration, the roles as programs, the supervisor behind `up` and `demo`, the views."""
