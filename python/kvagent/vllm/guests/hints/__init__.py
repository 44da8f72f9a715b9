"""How blocks will be used: facts of the end of requests, and hints of clients and routers
(docs/STEERING.md).
"""
