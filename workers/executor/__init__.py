"""The rollout executor: runs turns on an engine, swaps policy versions between steps, reports its slack."""
