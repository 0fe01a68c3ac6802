"""Several processes that train one model: sharded tensors, and what ranks must agree on."""
