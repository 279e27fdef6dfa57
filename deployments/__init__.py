"""Runs Carousel on Ray Serve, Ray Data and Ray jobs. Everything that does not depend on Ray is in `app`."""
