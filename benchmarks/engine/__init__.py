"""The engine measured in this process: throughput, parts of a step, strategies, the cost of single features."""
