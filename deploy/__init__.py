"""What is deployed: images, compose file, chart; and `generate`, which writes what of them follows from the code."""
