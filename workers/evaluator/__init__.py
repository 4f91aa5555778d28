"""Evaluates policy versions during training, on prompts that are never trained on."""
