"""The fast way on a GPU: Triton kernels of ours, CUDA graphs around decode steps, steps launched ahead."""
