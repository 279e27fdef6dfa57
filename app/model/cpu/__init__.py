"""Our own C++ for CPUs: paged attention, and whole decoder steps for the models it knows. Built once, on first use."""
