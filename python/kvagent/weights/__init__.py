"""Which weights lie in the files of a model: a digest that every tensor goes into, made in seconds."""
