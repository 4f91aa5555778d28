"""A lender by requests: an executor whose engine is a server elsewhere, asked over HTTP.

`http_engine` plays an engine at the executor's channel, `api` is what it asks of the server; `concurrency_limit` (how
many turns at once) and `weights_proof` (whether a version is the one that answers) decide.
"""
