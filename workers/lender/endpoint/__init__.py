"""A lender by requests: an executor whose engine is a vLLM server elsewhere, used over HTTP.

`http_engine` answers the executor's channel in place of an engine. `protocol` says what it needs of a server, and
`vllm_client` makes the requests to a vLLM server.
`concurrency_limit` decides how many turns run at once, and `weights_proof` whether the server answers with a version.
"""
