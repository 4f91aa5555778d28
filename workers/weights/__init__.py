"""Policy versions on the log: cut into chunks and published, fetched, verified and staged."""
