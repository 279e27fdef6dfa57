"""Runs Carousel on Ray Serve, Ray Data and Ray jobs. All code that does not depend on Ray is in `app`."""
