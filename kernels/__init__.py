"""Triton paged-attention kernels, and the means to test kernels without a GPU."""
