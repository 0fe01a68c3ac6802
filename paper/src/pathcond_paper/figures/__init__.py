"""The figures and tables, one module each."""
