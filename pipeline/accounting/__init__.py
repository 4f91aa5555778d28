"""What became of every trajectory: groups for the trainer, the ledger, the audit."""
