"""Criteria that are measured on the batch, at the point where the weights are in balance."""
