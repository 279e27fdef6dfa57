"""The common code of all benchmarks: workloads, options, the service under test, HTTP, figures and tables."""
