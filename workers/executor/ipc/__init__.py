"""Messages and shared memory between an executor and the engine process."""
