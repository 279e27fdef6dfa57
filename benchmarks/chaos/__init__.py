"""The reliability table: deliberate faults in the real service, and their effects on clients."""
