"""Where Carousel runs: Ray Serve, Ray Data, Ray jobs, and only those. What the system does is in `app`."""
