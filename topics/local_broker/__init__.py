"""The broker of one machine: the embedded default or an Apache Kafka node, and the idle back-off of its consumers."""
