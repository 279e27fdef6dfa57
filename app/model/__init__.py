"""The only package that imports torch: weights, KV memory, attention and sampling."""
