"""The only room that imports torch: weights, KV memory, attention, sampling."""
