"""A lender by requests: an executor whose engine is a vLLM server elsewhere, used over HTTP.

`http_engine` answers the executor's channel in place of an engine, and `api` makes the requests to the server.
`concurrency_limit` decides how many turns run at once, and `weights_proof` whether the server answers with a version.
"""
