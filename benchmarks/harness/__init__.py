"""What all benchmarks share: workloads, options, the service under test, HTTP, figures and tables."""
