"""The whole system: one config tree, one table of metrics, one loop over Ray actors."""
