"""The rollout engine, on vLLM.

Keeps true: only the import of `process_env` changes the importing process.
"""
