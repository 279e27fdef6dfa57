"""Bulk work: rows of files in, one record for each out, exactly once whatever dies. No Ray, no torch here."""
