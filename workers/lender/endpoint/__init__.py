"""A lender by requests: an executor whose engine is a server elsewhere, used over HTTP.

`main.open_server` chooses the kind of server: `server_interface` says what the lender needs of a server, and
`server_vllm` makes the requests to a vLLM server. `http_engine` answers the executor's channel in place of an engine.
`concurrency_limit` decides how many turns run at once. `versions` loads a version, and proves that the server answers
with it.
"""
