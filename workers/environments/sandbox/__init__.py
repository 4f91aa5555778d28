"""An environment in which a policy runs shell commands and Python programs: namespaces, checkpoints and leases."""
