"""The largest magnitude that compressors and kernels take; larger ones count as this."""

LIMIT = 2.0**126
"""The largest magnitude that compressors carry. Larger values, infinity among them, count as this, and NaN as 0: no
payload and no residual ever holds a value that is not finite. (Sessions refuse gradients that are not finite.)"""
