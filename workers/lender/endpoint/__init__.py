"""A lender by requests: an executor whose engine is a server elsewhere, asked over HTTP.

`player` plays an engine at the executor's wires, `api` is what it asks of the server; `pace` (how many turns at once)
and `proof` (whether a version is the one that answers) decide.
"""
