"""The demo: a transformer whose KV cache is computed in one process and used in another.

`model` is the transformer, `processes` what the spawned processes do, `run` starts and watches
them, `show` prints what came out.  Nothing here is imported by the rest of the package.
"""
