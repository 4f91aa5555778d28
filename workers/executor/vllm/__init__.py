"""The rollout engine, over vLLM.

Keeps true: nothing here changes the process that it is imported in, but `process_env`.
"""
