"""Bulk runs measured: what deaths cost them."""
