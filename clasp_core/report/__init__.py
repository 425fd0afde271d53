"""Tables and figures from stored rows alone; nothing here loads a model."""
