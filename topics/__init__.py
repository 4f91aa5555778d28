"""The bus: the topic catalog, typed readers and writers, the local broker, and bounded reads of the log."""
