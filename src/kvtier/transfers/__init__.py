"""Moving bytes between an engine's tensors and the pool: jobs, layout, copy kernels and worker threads.

The only concurrency in kvtier's data path is `kvtier.transfers.worker`.
"""
