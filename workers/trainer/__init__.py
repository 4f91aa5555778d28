"""The trainer: token-level GRPO in plain PyTorch, its policy model and its checkpoints."""
