"""Descriptions of ROSE's topics for other programs: AsyncAPI and JSON Schema."""
