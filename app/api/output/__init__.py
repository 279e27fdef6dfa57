"""Outputs of models: the form that they must have (structured output, tools), and the responses made from them."""
