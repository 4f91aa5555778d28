"""The bus: the topic catalog, typed reading and writing, the broker on this machine, the log read back."""
