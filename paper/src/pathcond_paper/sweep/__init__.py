"""Runs over processes or a cluster; rows that survive a kill."""
