"""Our Triton kernels and decoder for GPUs, steps replayed from CUDA graphs, and steps launched ahead."""
