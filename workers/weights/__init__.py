"""Transfer of policy versions over the log: published in chunks; fetched, verified and staged by receivers."""
