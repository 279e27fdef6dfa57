"""The fast backend of a GPU: our Triton kernels, steps captured in CUDA graphs, and steps launched ahead."""
