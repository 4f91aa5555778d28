"""The local broker: the embedded default or an Apache Kafka node, and the idle back-off of its consumers."""
