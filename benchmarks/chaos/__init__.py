"""The reliability table: faults made on purpose in the real service, and what its clients saw of them."""
