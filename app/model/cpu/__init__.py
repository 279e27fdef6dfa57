"""Our C++ code for CPUs, built on first use: paged attention, and whole decoder steps for supported models."""
