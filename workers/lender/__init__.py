"""What a serving engine lends to rollouts, decided where it serves: steps, memory, and when a guest is there at all."""
