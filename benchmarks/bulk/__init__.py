"""Bulk runs measured: what a service lends them, and what deaths cost them."""
