"""Architecture arithmetic of one component: shapes, parameters, FLOPs, bytes kept for the backward pass.

Pure functions on the schema's components. Nothing here knows of clusters, schedules or engines.
"""
