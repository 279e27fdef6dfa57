"""Runs Carousel on Ray Serve, Ray Data and Ray jobs. The system itself is in `app`, which does not depend on Ray."""
