"""Who shards, and who executes a plan: one module an engine; `registry` has them by name.

Nothing is imported here, so that the rules read DeepSpeed's key table without the configuration's schema.
"""
