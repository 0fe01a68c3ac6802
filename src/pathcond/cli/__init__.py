"""The command line; ``commands`` needs the extra "cli", ``exits`` nothing."""
