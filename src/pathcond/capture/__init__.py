"""One call of a model as a Graph of ATen calls. The only rooms that know torch.export."""
