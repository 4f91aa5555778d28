"""The state of every trajectory: the ledger and the audit of the conservation law."""
