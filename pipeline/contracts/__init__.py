"""What other programs read of ROSE's topics: AsyncAPI and JSON Schema."""
